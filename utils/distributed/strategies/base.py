"""How a model is spread over ranks: the base of all strategies, which is also that of one process.

The trainer sees a model's parameters only as `parameters`, ordinary tensors on this rank's device,
never as a wrapper of the model. Only strategies decide what ranks communicate about the model, and
when; for local steps LocalSteps does (utils/training/local/steps.py).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...exchange import Exchange
from ...model_tensors import ModelTensors
from ...place import resolve
from ...settings.distributed import STRATEGIES


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, by name; its constructor makes the others."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class Strategy(ModelTensors):
    """One process, no communication. Other strategies override what differs.

    In the order of a step: `micro_batch` around each forward and backward pass,
    `collect_gradients`, `norm`, `agree`, the optimizer's step, `drop_gradients`, `after_step`.
    Before an evaluation or a checkpoint: `make_equal`.

    Args:
        model: on its device already.
        exchange: with the other ranks; None: there are none.
        unfreezes: parameters that need no gradient now will do so later.

    Attributes:
        model: with its canonical names.
        called: what the objective calls in its place.
        parameters: {name: tensor that the optimizer updates}.
        divided: whether `parameters` are this rank's rows of larger tensors.
        adds_in_order: whether gradients are added in the same order in every step from the first
            one (see DDP).
        skeleton: the whole model, to be called with other weights (torch.func.functional_call).
    """

    divided, adds_in_order = False, True

    def __init__(self, model: nn.Module, exchange: Exchange | None = None, unfreezes: bool = False):
        super().__init__(model)
        self.exchange = exchange or Exchange()
        self.called = self.skeleton = model
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())

    def substitute(self, module: nn.Module) -> nn.Module:
        """Makes `module` compute in place of the model, with the model's own parameters and
        buffers. Returns what the objective calls."""
        return module

    # ---- a step ---------------------------------------------------------------------------------

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch's forward and backward pass. Gradients are exchanged in the
        last one of a step, and are then the sum over all ranks divided by their number."""
        return contextlib.nullcontext()

    def collect_gradients(self) -> None:
        """After the backward passes of a step: the gradients are in `parameters`."""

    def norm(self, rank_norm: Tensor) -> Tensor:
        """The norm of the whole gradient, (), from `rank_norm`, that of this rank's `parameters`,
        ()."""
        return rank_norm

    def agree(self, loss: Tensor, statistics: list[Tensor]) -> Tensor:
        """The mean loss of all ranks, (), by which a step is accepted or left out.

        Args:
            statistics: floating-point buffers, such as BatchNorm's, of each rank's own samples;
                replaced by the mean over the ranks, in place.
        """
        return loss

    def drop_gradients(self) -> None:
        """Clears the gradients for the next step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def after_step(self, lr: float | Tensor, bad: Tensor) -> None:
        """After the optimizer's step.

        Args:
            lr: the learning rate of the step.
            bad: () bool on the device: the step was not applied.
        """

    def make_equal(self) -> None:
        """Makes all ranks hold the same model; called before an evaluation or a checkpoint.
        Strategies whose ranks are equal after every step have nothing to do."""

    @property
    def optimizer_exchange(self) -> Exchange:
        """The exchange with which an optimizer can share its work among ranks that all take the
        same steps with the same gradients."""
        return self.exchange

    # ---- the model ------------------------------------------------------------------------------

    def optimized_tensor(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer updates in place of this parameter of `model`."""
        return parameter

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under their canonical names, as this rank holds them."""
        return self.model.state_dict()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Puts whole tensors into the model.

        Raises:
            UserError: they are of another model; nothing is changed.
        """
        held, exchange = self.tensors() | self.parameters, self.exchange
        shapes = {name: tuple(exchange.shape(tensor)) for name, tensor in held.items()}
        wrong = [f"{name} is missing" for name in held if name not in tensors]
        wrong += [f"there is no {name} in the model" for name in tensors if name not in held]
        wrong += [
            f"{name} is {tuple(tensors[name].shape)}, in the model {shape}"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(f"the checkpoint does not fit the model: {'; '.join(wrong[:3])}{more}")
        for name, tensor in held.items():
            tensor.copy_(exchange.part(tensor, tensors[name]))
        self.weights_changed()

    def weights_changed(self) -> None:
        """To be called after anything but the optimizer has written to the weights."""


class Synchronous(Strategy):
    """Ranks that take every step together, and hold the same model after it."""

    def agree(self, loss: Tensor, statistics: list[Tensor]) -> Tensor:
        # In one collective. ResNet-50's statistics have 0.2 % of the size of its gradients.
        flat = torch.cat([loss.view(1), *(values.double() for values in statistics)])
        sizes = [1, *(len(values) for values in statistics)]
        loss, *means = self.exchange.mean(flat).split(sizes)
        for values, mean in zip(statistics, means, strict=True):
            values.copy_(mean)
        return loss[0]


def build_strategy(
    name: str, model: nn.Module, exchange: Exchange, unfreezes: bool = False
) -> Strategy:
    """`name`: a key of STRATEGIES; no effect if there is only one process. Else as Strategy."""
    if exchange.size == 1:
        return Strategy(model, exchange)
    place = STRATEGIES[name].place
    if place is None:  # a worker of local steps, which exchange for it
        return Strategy(model)
    return resolve(place)(model, exchange, unfreezes)
