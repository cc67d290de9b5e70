"""Online natural-gradient descent, as the rest of the toolkit knows it: see optimizer.py.

Learning rate and weight decay mean what they do for AdamW; with `ngd_norm` "gradient", what they do
for SGD.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..adamw import AdamPartFlags
from ..entry import MATRICES, OptimizerEntry, Range, optimizer_flag
from ..muon import heads_in
from ..sgd import SGD

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor
    from torch.optim import Optimizer

    from ...exchange import Exchange


@dataclass
class NgdFlags(AdamPartFlags):
    ngd_alpha: float | None = optimizer_flag(
        None,
        "Damping of ngd's Fisher matrices, in multiples of their mean diagonal; larger is "
        "closer to the plain gradient",
        above=0,
        default_text="0.01 with --ngd_power 0.5, 4 with 1",
    )
    ngd_rank: int | None = optimizer_flag(
        None,
        "Rank of the low-rank part of ngd's Fisher matrices",
        low=1,
        default_text="half the axis's length, at most 80",
    )
    ngd_update_period: int = optimizer_flag(
        4, "Steps between two updates of ngd's Fisher matrices", low=1, unit="steps", resume="free"
    )
    ngd_eta: float = optimizer_flag(
        0.1,
        "Weight of the newest gradient in the running mean of ngd's Fisher matrices",
        above=0,
        high=1,
    )
    ngd_axes: str | None = optimizer_flag(
        None,
        "Axes of kernels that have a Fisher matrix each. patch: output channels, and all the rest, "
        "a patch of the layer's input; channels: output and input channels; kernel: these, and all "
        "9 positions of a 3x3 kernel; all: these, and rows and columns of the positions",
        choices=("patch", "kernel", "all", "channels"),
        default_text="patch with --ngd_norm fixed, all with gradient",
        before="all",
    )
    ngd_norm: str = optimizer_flag(
        "fixed",
        "Step length of ngd. fixed: that of adamw and muon, so --lr and --weight_decay mean the "
        "same as with these; gradient: as long as the gradient, as in the paper, so they mean the "
        "same as with sgd, whose defaults apply",
        choices=("fixed", "gradient"),
    )
    ngd_power: float | None = optimizer_flag(
        None,
        "Power of the inverse Fisher matrix of each axis: 0.5, its inverse square root; or 1, its "
        "inverse, as in the paper, which slows strong directions down further",
        choices=(0.5, 1.0),
        default_text="0.5 with --ngd_norm fixed, 1 with gradient",
        before=1.0,
    )
    ngd_momentum_first: bool | None = optimizer_flag(
        None,
        "on: ngd preconditions the momentum, so each step has the length that --ngd_norm says; "
        "off: takes momentum of the preconditioned gradients, as in the paper",
        default_text="on with --ngd_norm fixed, off with gradient",
        before=False,
    )
    ngd_adam: bool | None = optimizer_flag(
        None,
        "With ngd, steps of AdamW for embeddings, norms and biases",
        default_text="on with --ngd_norm fixed, off with gradient",
        before=False,
    )
    ngd_orthogonal: bool | None = optimizer_flag(
        None,
        "Make all singular values of ngd's steps of hidden matrices about 1, as muon does, and, "
        "with --ngd_adam, leave the classifier to Adam; kernels are matrices with --ngd_axes patch",
        default_text="on with --ngd_norm fixed, off with gradient",
        before=False,
    )


def missing_flags(flags: NgdFlags) -> dict[str, object]:
    """Defaults of those flags that are None: the paper's with steps as long as the gradient, else
    those that were found to be better (benchmarks/results/ngd.md and large_batch.md)."""
    fixed = flags.ngd_norm == "fixed"
    power = flags.ngd_power or (0.5 if fixed else 1.0)
    alpha = 4.0 if power == 1 else 0.01
    orthogonal = fixed if flags.ngd_orthogonal is None else flags.ngd_orthogonal
    defaults = {
        "ngd_power": power, "ngd_momentum_first": fixed, "ngd_adam": fixed, "ngd_alpha": alpha,
        "ngd_orthogonal": orthogonal, "adam_lr_scale": 0.4 if orthogonal else 1.0,
        "ngd_axes": "patch" if fixed else "all",
    }  # fmt: skip
    return {name: value for name, value in defaults.items() if getattr(flags, name) is None}


def make(
    groups: list[dict],
    *,
    lr: float,
    momentum: float,
    ngd_products: str = "float32",
    exchange: "Exchange | None" = None,
    heads: "Collection[Tensor]" = (),
    **flags,
) -> "Optimizer":
    """With Nesterov momentum, unless momentum is 0. Weight decay is decoupled with `ngd_norm`
    "fixed": added to the gradient, it could only turn steps whose length is fixed. Ranks share the
    updates of Fisher matrices through `exchange`.

    Args:
        groups: the first has all matrices that are not embeddings.
        heads: parameters of the classifier, as in muon.py.
        flags: of NgdFlags.
    """
    from .optimizer import NGD

    given = NgdFlags(**flags)
    flags = vars(given) | missing_flags(given)
    own = {name.removeprefix("ngd_"): value for name, value in flags.items()}
    scale = own.pop("adam_lr_scale")
    if own.pop("adam"):
        groups = _with_adam(groups, scale, heads if own["orthogonal"] else None)
    return NGD(
        groups,
        lr=lr,
        momentum=momentum,
        nesterov=momentum > 0,
        decoupled=own["norm"] == "fixed",
        products=ngd_products,
        exchange=exchange,
        **own,
    )


def _with_adam(
    groups: list[dict], lr_scale: float, heads: "Collection[Tensor] | None"
) -> list[dict]:
    """The groups, with all but the matrices of the first one marked for Adam's steps, with
    `lr_scale` times the learning rate; and unless `heads` is None those of the classifier, too."""
    group, *others = groups
    of_adam = {id(p) for p in group["params"] if p.ndim <= 1}
    if heads is not None:
        of_adam |= {id(p) for p in heads_in(group["params"], heads)}
    matrices = [p for p in group["params"] if id(p) not in of_adam]
    rest = [p for p in group["params"] if id(p) in of_adam]
    adam = {"adam": True, "lr_scale": lr_scale}
    own = [group | {"params": matrices}, group | {"params": rest} | adam]
    own += [other | adam for other in others]
    return [each for each in own if each["params"]]


class NgdEntry(OptimizerEntry):
    """With steps as long as the gradient its rates are those of sgd."""

    def defaults(
        self, transformer: bool = False, *, ngd_norm: str = "fixed", **own
    ) -> dict[str, float | None]:
        if ngd_norm == "gradient":
            return SGD.defaults()
        return super().defaults(transformer)

    def own_defaults(self, **own) -> dict[str, object]:
        return missing_flags(NgdFlags(**own))

    def lr_scaling(self, *, ngd_norm: str = "fixed", **own) -> str:
        return SGD.lr_scaling() if ngd_norm == "gradient" else super().lr_scaling()

    def products(self, precision: str) -> dict[str, object]:
        """Gradients that were computed in half precision lose nothing in rounded products."""
        return {} if precision == "fp32" else {"ngd_products": "fast"}

    def advice(self, **own) -> str:
        plain = "--no_ngd_orthogonal or " if own["ngd_orthogonal"] else ""
        return f"{plain}--ngd_update_period {2 * own['ngd_update_period']} makes them cheaper"


def _of_sgd(name: str) -> Range:
    [range_] = SGD.ranges[name]
    return replace(range_, when=(("ngd_norm", "gradient"),))


FIXED = (("ngd_norm", "fixed"),)
# Of the damping, for powers 0.5 and 1.
OF_ROOTS = Range(1e-3, 0.3, grid=(3e-3, 0.01, 0.03))
OF_INVERSES = Range(0.5, 32.0, grid=(1.0, 4.0, 16.0))
NGD_ENTRY = NgdEntry(
    summary="momentum on natural gradients",
    make=make,
    # Found in benchmarks/results/ngd.md and large_batch.md for batches of 128 pictures and 64
    # texts; the momentum of sgd, and the weight decay of the others for runs longer than those.
    lr=0.02,
    lr_of_transformers=4e-3,
    weight_decay=0.05,
    momentum=0.9,
    flags=NgdFlags,
    needs=MATRICES,
    takes_exchange=True,
    takes_heads=True,
    whole_state=("basis_", "spectrum_", "rest_"),
    capturable=True,
    ranges={
        "lr": (Range(2e-3, 0.1, grid=(0.01, 0.02, 0.04), when=FIXED), _of_sgd("lr")),
        "weight_decay": (
            Range(1e-3, 1.0, grid=(0.05, 0.15, 0.5), when=FIXED),
            _of_sgd("weight_decay"),
        ),
        "ngd_alpha": (
            replace(OF_ROOTS, when=(("ngd_power", 0.5),)),
            replace(OF_INVERSES, when=(("ngd_power", 1.0),)),
            # The defaults of --ngd_power.
            replace(OF_ROOTS, when=FIXED),
            replace(OF_INVERSES, when=(("ngd_norm", "gradient"),)),
        ),
        "ngd_eta": (Range(0.02, 0.5, grid=(0.05, 0.1, 0.3)),),
        "ngd_update_period": (Range(1, 16, grid=(2, 4, 8)),),
    },
    first_steps="the first ten steps of ngd all update its Fisher matrices, and take longer than "
    "the others",
)
