"""Makes the optimizers of the table: the trainer, the entries and the tests use nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from utils.optim.table import OPTIMIZERS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from utils.exchange import Exchange


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_all: bool = False,
    own: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> list[dict]:
    """Parameters with weight decay, then those without.

    Without are vectors and scalars, which are biases and the scales of norms (He et al., "Bag of
    tricks" (2019), section 3.1), and what `model.no_weight_decay()` names. A model without this
    method, which is that of timm's models, spares the tables of embeddings, of which a step shrinks
    the rows that it does not use.

    Args:
        decay_all: those have weight decay too.
        own: what is stepped in a parameter's place.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exempt = _never_decayed(model)
    spared = {p for p in trained if p in exempt or (p.ndim <= 1 and not decay_all)}
    groups = [
        {"params": [own(p) for p in trained if p not in spared], "weight_decay": weight_decay},
        {
            "params": [own(p) for p in trained if p in spared],
            "weight_decay": weight_decay if decay_all else 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def _never_decayed(model: nn.Module) -> set[Tensor]:
    """Parameters that have no weight decay whatever their shape, unless all have it."""
    from torch import nn

    if hasattr(model, "no_weight_decay"):
        names = model.no_weight_decay()
        return {p for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    return {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }


def is_capturable(name: str, lookahead_k: int | None) -> bool:
    """Whether a CUDA graph can hold the steps of the optimizer `name`; Lookahead counts its own on
    the host."""
    return OPTIMIZERS[name].capturable and lookahead_k is None


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    momentum: float | None = None,
    decay_all: bool = False,
    lookahead_k: int | None = None,
    lookahead_alpha: float = 0.5,
    in_place_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    exchange: Exchange | None = None,
    **own,
) -> Optimizer:
    """The optimizer `name` (a key of OPTIMIZERS) over the parameters of `model` that are trained.

    Every optimizer made here leaves its parameters and its state as they were when its attribute
    `found_inf`, a float tensor of shape () on the device, is 1 at the time of `step()`; a flagged
    first step is as if it had not been. The device never waits for the host, nor the host for the
    present step: see found_inf.py for those that count on the host (timm's, and lookahead), of
    which `state_dict()` gives the state, `state` itself not before the next step. Each parameter
    group keeps the peak rate as `base_lr` for the schedule.

    Args:
        lr, weight_decay: mean what the file of the optimizer says.
        momentum: None for the default of the optimizer; no effect where that has none.
        decay_all: weight decay on biases, norms and embeddings too.
        lookahead_k: steps between two synchronisations of Lookahead; None for none.
        lookahead_alpha: how far the slow weights go; no effect without `lookahead_k`.
        in_place_of: what is stepped in place of a parameter of the model: the part that this
            process holds.
        exchange: the other ranks; None: a process alone. Most optimizers ask nothing of them.
        own: settings of this optimizer alone (`OptimizerEntry.own`), and its `products`.
    """
    entry = OPTIMIZERS[name]
    groups = parameter_groups(model, weight_decay, decay_all, in_place_of)
    if entry.momentum is not None:
        own["momentum"] = entry.momentum if momentum is None else momentum
    if entry.takes_exchange:
        own["exchange"] = exchange
    optimizer = entry.make(groups, lr=lr, **own)
    if lookahead_k is not None:
        from utils.optim.lookahead import Lookahead

        optimizer = Lookahead(optimizer, lookahead_k, lookahead_alpha)
    for group in optimizer.param_groups:
        group["base_lr"] = lr
    return optimizer
