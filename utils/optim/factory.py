"""One factory for all optimizers: the trainer, the entries and the tests use nothing else.

The table is read by the flags too, so this module imports PyTorch only when it makes something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.optim.libraries import lamb, madgrad, muon

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from utils.exchange import Exchange


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


def adamw(groups, *, lr: float) -> Optimizer:
    """AdamW: Loshchilov and Hutter (2019); its two moments are left at their usual rates."""
    import torch

    return torch.optim.AdamW(groups, lr=lr, fused=True)


def ngd(
    groups,
    *,
    lr: float,
    momentum: float,
    ngd_alpha: float = 4.0,
    ngd_rank: int | None = None,
    ngd_update_period: int = 4,
    ngd_eta: float = 0.1,
    ngd_axes: str = "all",
    ngd_norm: str = "fixed",
    ngd_products: str = "float32",
    exchange: Exchange | None = None,
) -> Optimizer:
    """Natural-gradient descent with Nesterov momentum (plain where momentum is 0). Weight decay is
    decoupled with `ngd_norm` "fixed", whose steps would else turn with it. Ranks share the updates
    of Fisher matrices through `exchange`."""
    from utils.optim.ngd.optimizer import NGD

    return NGD(
        groups,
        lr=lr,
        momentum=momentum,
        nesterov=momentum > 0,
        decoupled=ngd_norm == "fixed",
        alpha=ngd_alpha,
        rank=ngd_rank,
        update_period=ngd_update_period,
        eta=ngd_eta,
        axes=ngd_axes,
        norm=ngd_norm,
        products=ngd_products,
        exchange=exchange,
    )


# The keywords of `ngd` that no other optimizer has, which are its flags too.
NGD_SETTINGS = (
    *("ngd_alpha", "ngd_rank", "ngd_update_period"),
    *("ngd_eta", "ngd_axes", "ngd_norm"),
)


@dataclass(frozen=True)
class OptimizerEntry:
    make: Callable[..., Optimizer]  # (groups, lr=, and each of `settings`)
    lr: float  # default learning rate
    weight_decay: float  # default weight decay
    momentum: float | None = None  # default; None where that is no setting of it
    own: tuple[str, ...] = ()  # settings that no other optimizer has
    shares: bool = False  # whether `make` takes an `exchange` with the other ranks

    @property
    def settings(self) -> tuple[str, ...]:
        """What `make` takes besides the learning rate."""
        return (() if self.momentum is None else ("momentum",)) + self.own


OPTIMIZERS = {
    "sgd": OptimizerEntry(sgd, lr=0.1, weight_decay=5e-4, momentum=0.9),
    "adamw": OptimizerEntry(adamw, lr=1e-3, weight_decay=0.05),
    # The rate and decay of ResNet-50 in Wightman, Touvron and Jegou, "ResNet strikes back" (2021),
    # arXiv:2110.00476, whose 5e-3 at 2,048 samples is 1.25e-3 at 128 by the square root of the
    # batch, the rule of LAMB's paper.
    "lamb": OptimizerEntry(lamb, lr=1.25e-3, weight_decay=0.02),
    # Those of AdamW, to whose steps its own are scaled; the momentum of its authors.
    "muon": OptimizerEntry(muon, lr=1e-3, weight_decay=0.05, momentum=0.95),
    # Those of CIFAR-10 in its paper.
    "madgrad": OptimizerEntry(madgrad, lr=2.5e-4, weight_decay=1e-4, momentum=0.9),
    # Found by the study in benchmarks/results/ngd.md for batches of 128; the momentum of sgd.
    "ngd": OptimizerEntry(
        ngd, lr=9e-3, weight_decay=0.05, momentum=0.9, own=NGD_SETTINGS, shares=True
    ),
}


def defaults(name: str, ngd_norm: str = "fixed") -> dict[str, float | None]:
    """Learning rate, weight decay and momentum of the optimizer `name` unless others are asked
    for. ngd with steps as long as the gradient has those of sgd."""
    entry = OPTIMIZERS["sgd" if name == "ngd" and ngd_norm == "gradient" else name]
    return {"lr": entry.lr, "weight_decay": entry.weight_decay, "momentum": entry.momentum}


def products(name: str, precision: str) -> dict:
    """Settings of the optimizer `name` that follow from the precision of the training: gradients
    of half precision are no better than rounded products with them."""
    return {"ngd_products": "fast"} if name == "ngd" and precision != "fp32" else {}


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_all: bool = False,
    own: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> list[dict]:
    """Parameters with weight decay, then those without: biases and the scales of norms, which
    are the vectors and scalars among them (He et al., "Bag of tricks" (2019), section 3.1), and
    the tables of embeddings, of which a step shrinks the rows that it does not use. `own` tells
    what is stepped in a parameter's place."""
    from torch import nn

    tables = {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    spared = [p for p in trained if p in tables or (p.ndim <= 1 and not decay_all)]
    others = {*spared}
    groups = [
        {"params": [own(p) for p in trained if p not in others], "weight_decay": weight_decay},
        {"params": [own(p) for p in spared], "weight_decay": weight_decay if decay_all else 0.0},
    ]
    return [group for group in groups if group["params"]]


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
        lr: step size; for sgd per unit of gradient, for adamw, muon and ngd about the change of a
            weight, for lamb about the relative change of a layer's weights. ngd with `ngd_norm`
            "gradient" is like sgd in this and the next.
        weight_decay: adamw, muon and ngd shrink the weight by it times lr; sgd and madgrad add it
            times the weight to the gradient, lamb to the step before that is scaled to the layer's
            norm.
        momentum: None for the default of OPTIMIZERS; no effect on those that have none there.
        decay_all: weight decay on biases, norms and embeddings too.
        lookahead_k: steps between two synchronisations of Lookahead; None for none.
        lookahead_alpha: how far the slow weights go; no effect without `lookahead_k`.
        in_place_of: what is stepped in place of a parameter of the model: the part that this
            process holds.
        exchange: the other ranks; None: a process alone. Only ngd asks anything of them.
        own: settings of this optimizer alone (`OptimizerEntry.own`).
    """
    entry = OPTIMIZERS[name]
    groups = parameter_groups(model, weight_decay, decay_all, in_place_of)
    if entry.momentum is not None:
        own["momentum"] = entry.momentum if momentum is None else momentum
    if entry.shares:
        own["exchange"] = exchange
    optimizer = entry.make(groups, lr=lr, **own)
    if lookahead_k is not None:
        from utils.optim.lookahead import Lookahead

        optimizer = Lookahead(optimizer, lookahead_k, lookahead_alpha)
    for group in optimizer.param_groups:
        group["base_lr"] = lr
    return optimizer
