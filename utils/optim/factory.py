"""Makes the optimizers in the table; all other code makes them through `build_optimizer`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from .table import OPTIMIZERS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..exchange import Exchange


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_all: bool = False,
    in_place_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> list[dict]:
    """One or two groups of parameters; the second one has those that are exempt from weight decay.

    Exempt are vectors and scalars, that is biases and the scales of norms (He et al., "Bag of
    tricks" (2019), section 3.1), and the parameters that `model.no_weight_decay()` names, with *
    for any characters, as in timm. In models without this method embedding tables are exempt:
    weight decay would shrink even the rows that a step does not use.

    Args:
        decay_all: weight decay for the second group, too, which then has only embeddings, or what
            `model.no_weight_decay()` names.
        in_place_of: parameter of the model -> what the optimizer steps in its place.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exempt = _never_decayed(model)
    spared = {p for p in trained if p in exempt or (p.ndim <= 1 and not decay_all)}
    groups = [
        {
            "params": [in_place_of(p) for p in trained if p not in spared],
            "weight_decay": weight_decay,
        },
        {
            "params": [in_place_of(p) for p in trained if p in spared],
            "weight_decay": weight_decay if decay_all else 0.0,
        },
    ]
    # The first one stays even if it is empty: optimizers know by its place what may be a matrix.
    return groups if groups[1]["params"] else groups[:1]


def _never_decayed(model: nn.Module) -> set[Tensor]:
    """Parameters that are exempt from weight decay whatever their shape."""
    from torch import nn

    if hasattr(model, "no_weight_decay"):
        patterns = model.no_weight_decay()
        return {
            parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    return {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }


def is_capturable(name: str, lookahead_k: int | None) -> bool:
    """Whether a CUDA graph can hold the steps of the optimizer `name`. Not with Lookahead, which
    counts its steps on the host."""
    return OPTIMIZERS[name].is_capturable() and lookahead_k is None


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
    lr_scales: Mapping[Tensor, float] | None = None,
    exact: Iterable[Tensor] = (),
    heads: Iterable[Tensor] = (),
    **own,
) -> Optimizer:
    """The optimizer `name` (a key of OPTIMIZERS) over the trainable parameters of `model`.

    Every optimizer made here honours `found_inf`, an attribute that the caller sets before
    `step()`: a float tensor of shape () on the device. If it is 1, parameters and optimizer state
    stay as they were, even at the first step. The device never waits for the host, nor the host for
    the current step.
    Each parameter group keeps the peak learning rate as `base_lr` for the schedule.

    Args:
        lr, weight_decay: as the optimizer's file defines them.
        momentum: None: the optimizer's default; no effect if the optimizer has none.
        decay_all: weight decay on biases, norms and embeddings too.
        lookahead_k: steps between two synchronisations of Lookahead; None: no Lookahead.
        lookahead_alpha: how far the slow weights move; no effect without `lookahead_k`.
        in_place_of: parameter of the model -> what the optimizer steps in its place: the part that
            this process holds.
        exchange: with the other ranks, for the few optimizers that use it; None: a single process.
        lr_scales: what the learning rate of a parameter is multiplied by, for every parameter that
            the optimizer steps; its groups are divided accordingly, and state it as `lr_scale`.
            None: 1 for all.
        exact: parameters whose scale is that of `lr_scales` alone, although the optimizer scales
            the rates of their group (`adam_lr_scale`).
        heads: parameters of the model's classifier, for the few optimizers that treat them apart.
        own: settings of this optimizer alone (`OptimizerEntry.own`), and its `products`.
    """
    entry = OPTIMIZERS[name]
    groups = parameter_groups(model, weight_decay, decay_all, in_place_of)
    if entry.momentum is not None:
        own["momentum"] = entry.momentum if momentum is None else momentum
    if entry.takes_exchange:
        own["exchange"] = exchange
    if entry.takes_heads:
        own["heads"] = [in_place_of(parameter) for parameter in heads]
    optimizer = entry.make(groups, lr=lr, **own)
    if lr_scales is not None:
        _divide_by_scale(optimizer, lr_scales, {id(in_place_of(p)) for p in exact})
    if lookahead_k is not None:
        from .lookahead import Lookahead

        optimizer = Lookahead(optimizer, lookahead_k, lookahead_alpha)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] = lr * group.get("lr_scale", 1.0)
    return optimizer


def _divide_by_scale(
    optimizer: Optimizer, lr_scales: Mapping[Tensor, float], exact: set[int]
) -> None:
    """Divides the groups of a new optimizer so that all parameters of a group have one scale."""
    groups = []
    for group in optimizer.param_groups:
        by_scale: dict[float, list[Tensor]] = {}
        of_group = group.get("lr_scale", 1.0)
        for parameter in group["params"]:
            own = 1.0 if id(parameter) in exact else of_group
            by_scale.setdefault(own * lr_scales[parameter], []).append(parameter)
        groups += [
            group | {"params": members, "lr_scale": scale} for scale, members in by_scale.items()
        ]
    optimizer.param_groups[:] = groups
