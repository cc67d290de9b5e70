"""Online natural-gradient descent, as the rest of the toolkit knows it: see optimizer.py.

Learning rate and weight decay mean what they do with AdamW, with `ngd_norm` "gradient" what they do
with SGD.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from utils.optim.entry import GROUP, MATRICES, OptimizerEntry, Range
from utils.optim.sgd import SGD
from utils.setting import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from utils.exchange import Exchange


@dataclass
class NgdFlags:
    ngd_alpha: float = setting(
        4.0,
        "Damping of ngd's Fisher matrices, in multiples of their mean diagonal; larger is "
        "closer to the plain gradient",
        group=GROUP,
        above=0,
    )
    ngd_rank: int | None = setting(
        None,
        "Rank of the low-rank part of ngd's Fisher matrices",
        group=GROUP,
        low=1,
        default_text="half the axis's length, at most 80",
    )
    ngd_update_period: int = setting(
        4,
        "Steps between two updates of ngd's Fisher matrices",
        group=GROUP,
        low=1,
        unit="steps",
        resume="free",
    )
    ngd_eta: float = setting(
        0.1,
        "Weight of the newest gradient in the running mean of ngd's Fisher matrices",
        group=GROUP,
        above=0,
        high=1,
    )
    ngd_axes: str = setting(
        "all",
        "Axes of a weight with a Fisher matrix: channels leaves out the short axes of "
        "kernels, such as 3x3",
        group=GROUP,
        choices=("all", "channels"),
    )
    ngd_norm: str = setting(
        "fixed",
        "Length of ngd's steps: fixed, where --lr and --weight_decay mean what they do with "
        "adamw and muon; or that of the gradient, where they mean what they do with sgd, "
        "whose defaults then hold",
        group=GROUP,
        choices=("fixed", "gradient"),
    )
    ngd_power: float = setting(
        1.0,
        "Power of the inverse Fisher matrix of each axis: 1 is that of the paper; 0.5 holds strong "
        "directions down less, and takes a smaller --ngd_alpha, such as 0.01",
        group=GROUP,
        choices=(1.0, 0.5),
    )
    ngd_momentum_first: bool = setting(
        False,
        "Takes momentum before ngd's Fisher matrices, not after them, so that each step has the "
        "length that --ngd_norm says",
        group=GROUP,
    )


def make(
    groups: list[dict],
    *,
    lr: float,
    momentum: float,
    ngd_alpha: float = 4.0,
    ngd_rank: int | None = None,
    ngd_update_period: int = 4,
    ngd_eta: float = 0.1,
    ngd_axes: str = "all",
    ngd_norm: str = "fixed",
    ngd_power: float = 1.0,
    ngd_momentum_first: bool = False,
    ngd_products: str = "float32",
    exchange: "Exchange | None" = None,
) -> "Optimizer":
    """With Nesterov momentum (plain where momentum is 0). Weight decay is decoupled with `ngd_norm`
    "fixed", whose steps would else turn with it. Ranks share the updates of Fisher matrices through
    `exchange`."""
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
        power=ngd_power,
        momentum_first=ngd_momentum_first,
        products=ngd_products,
        exchange=exchange,
    )


class NgdEntry(OptimizerEntry):
    """With steps as long as the gradient its rates are those of sgd."""

    def defaults(self, *, ngd_norm: str = "fixed", **own) -> dict[str, float | None]:
        return SGD.defaults() if ngd_norm == "gradient" else super().defaults()

    def lr_scaling(self, *, ngd_norm: str = "fixed", **own) -> str:
        return SGD.lr_scaling() if ngd_norm == "gradient" else super().lr_scaling()

    def products(self, precision: str) -> dict[str, object]:
        """Gradients of half precision are no better than rounded products with them."""
        return {} if precision == "fp32" else {"ngd_products": "fast"}

    def advice(self, *, ngd_update_period: int, **own) -> str:
        return f"--ngd_update_period {2 * ngd_update_period} makes them cheaper"


def _of_sgd(name: str) -> Range:
    [range_] = SGD.ranges[name]
    return replace(range_, when=(("ngd_norm", "gradient"),))


FIXED = (("ngd_norm", "fixed"),)
NGD_ENTRY = NgdEntry(
    summary="momentum on natural gradients",
    make=make,
    # Found by the study in benchmarks/results/ngd.md for batches of 128; the momentum of sgd.
    lr=9e-3,
    weight_decay=0.05,
    momentum=0.9,
    flags=NgdFlags,
    needs=MATRICES,
    takes_exchange=True,
    whole_state=("basis_", "spectrum_", "rest_"),
    ranges={
        "lr": (Range(1e-3, 0.1, grid=(3e-3, 9e-3, 0.03), when=FIXED), _of_sgd("lr")),
        "weight_decay": (
            Range(1e-3, 0.5, grid=(0.01, 0.05, 0.2), when=FIXED),
            _of_sgd("weight_decay"),
        ),
        "ngd_alpha": (Range(0.5, 32.0, grid=(1.0, 4.0, 16.0)),),
        "ngd_eta": (Range(0.02, 0.5, grid=(0.05, 0.1, 0.3)),),
        "ngd_update_period": (Range(1, 16, grid=(2, 4, 8)),),
    },
    first_steps="the first ten steps of ngd all update its Fisher matrices, and take longer than "
    "the others",
)
