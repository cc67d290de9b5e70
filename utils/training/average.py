"""Exponential moving average of the weights: Polyak and Juditsky (1992), in the form of
TensorFlow's ExponentialMovingAverage, whose decay grows from 0.1 so that the first, random
weights are soon forgotten.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..distributed.strategies.base import Strategy, saved_buffers
from ..model_tensors import names_of_shared


class Average:
    """mean <- mean + (1 - d) * (weights - mean), d = min(decay, (1 + t) / (10 + t)) at step t.

    BatchNorm's statistics are averaged likewise; integer buffers are not averaged.

    Args:
        model: on its device, after Guard has moved its buffers.
        decay: 0 to 1, exclusive.
        strategy: holds the model's parameters; None: a single process.
    """

    def __init__(self, model: nn.Module, decay: float, strategy: Strategy | None = None):
        self.strategy, self.decay = strategy or Strategy(model), decay
        tensors = self.strategy.parameters | saved_buffers(model)
        self.live = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.mean = {name: tensor.detach().clone() for name, tensor in self.live.items()}
        self.names_of_shared = names_of_shared(model)

    def ema_weight(self, step: int) -> float:
        """1 - d: how much the weights after optimizer step `step` (from 0) count in the average."""
        return 1.0 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, ema_weight: float | Tensor, bad: Tensor) -> None:
        """To be called after each optimizer step.

        Args:
            ema_weight: of this step; a number, or () float32 on the device.
            bad: () bool on the device: the step was not applied, so the average stays as it is.
        """
        weight = torch.where(bad, 0.0, ema_weight)
        mean, live = list(self.mean.values()), list(self.live.values())
        if bad.device.type == "cpu":  # one pass over memory
            weights = {tensor.dtype: weight.to(tensor.dtype) for tensor in live}
            torch._foreach_lerp_(mean, live, [weights[tensor.dtype] for tensor in live])
        else:  # three passes in a handful of kernels
            difference = torch._foreach_sub(live, mean)
            torch._foreach_mul_(difference, weight)
            torch._foreach_add_(mean, difference)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model holds the average. Memory is swapped, not copied, unless
        the model is divided, because FSDP keeps its own memory."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self.live.items():
            mean = self.mean[name]
            if self.strategy.divided:
                kept = tensor.clone()
                tensor.copy_(mean)
                mean.copy_(kept)
            else:
                tensor.data, mean.data = mean.data, tensor.data
        self.strategy.weights_changed()

    def state_dict(self) -> dict[str, Tensor]:
        """The average, under the names of the model's tensors and with its integer buffers, so that
        a plain model can load it."""
        tensors = self.strategy.tensors() | self.mean
        for name, first_name in self.names_of_shared.items():
            if {name, first_name} <= tensors.keys():
                tensors[name] = tensors[first_name]
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        exchange = self.strategy.exchange
        for name, mean in self.mean.items():
            mean.copy_(exchange.part(self.live[name], tensors[name]))
