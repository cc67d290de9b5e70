"""One factory for all optimizers: the trainer, the entries and the tests use nothing else.

The table is read by the flags too, so this module imports PyTorch only when it makes something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def sgd(groups, *, lr: float, momentum: float) -> Optimizer:
    """Stochastic gradient descent with Nesterov momentum (plain where momentum is 0)."""
    import torch

    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)
    if momentum:
        # The momentum is there from the start: when the very first step is left out because its
        # gradient is not finite, the fused kernel would leave this memory as it was allocated.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def adamw(groups, *, lr: float, momentum: float) -> Optimizer:
    """AdamW: Loshchilov and Hutter (2019); its two moments are left at their usual rates."""
    import torch

    return torch.optim.AdamW(groups, lr=lr, fused=True)


@dataclass(frozen=True)
class OptimizerEntry:
    make: Callable[..., Optimizer]  # (groups, lr=, momentum=)
    lr: float  # default learning rate
    weight_decay: float  # default weight decay
    settings: tuple[str, ...] = ()  # settings that only some optimizers have


OPTIMIZERS = {
    "sgd": OptimizerEntry(sgd, lr=0.1, weight_decay=5e-4, settings=("momentum",)),
    "adamw": OptimizerEntry(adamw, lr=1e-3, weight_decay=0.05),
}


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict]:
    """Parameters with weight decay, then those without: biases and the scales of norms, which
    are the vectors and scalars among them (He et al., "Bag of tricks" (2019), section 3.1)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if decay_all or p.ndim > 1]
    others = [p for p in trained if not decay_all and p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    decay_all: bool = False,
) -> Optimizer:
    """The optimizer `name` (a key of OPTIMIZERS) over the parameters of `model` that are trained.

    Every optimizer made here leaves its parameters and its state as they were when its attribute
    `found_inf`, a float tensor of shape () on the device, is 1 at the time of `step()`. Each
    parameter group keeps the peak rate as `base_lr` for the schedule.

    Args:
        lr: step size; for sgd per unit of gradient, for adamw about the change of a weight.
        weight_decay: sgd adds it times the weight to the gradient; adamw shrinks the weight by it
            times lr.
        momentum: of sgd; no effect on the others.
        decay_all: weight decay on biases and norms too.
    """
    groups = parameter_groups(model, weight_decay, decay_all)
    optimizer = OPTIMIZERS[name].make(groups, lr=lr, momentum=momentum)
    for group in optimizer.param_groups:
        group["base_lr"] = lr
    return optimizer
