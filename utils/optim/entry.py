"""What an optimizer says of itself; see table.py for how one is added.

`--help` reads the entries, so neither this module nor theirs import PyTorch before they make
something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

GROUP = "optimization"  # the heading of --help for an optimizer's own flags

# What a step needs to know of a parameter to change any element of it: its gradient there; norms
# of the whole parameter; the whole as a matrix. FSDP divides parameters among the ranks.
ELEMENTS, NORMS, MATRICES = "elements", "norms", "matrices"

# How the learning rate goes with the batch (Goyal et al., 2017; Malladi et al., 2022).
LINEAR, SQUARE_ROOT = "linear", "square root"


@dataclass(frozen=True)
class Range:
    """Where the search (tuning/) looks for a setting, unless the space says otherwise.

    Attributes:
        low, high: its ends.
        grid: points of --sampler grid.
        scale: "log", "linear" or "int".
        when: (setting, value) pairs with which this range counts.
    """

    low: float
    high: float
    grid: tuple[float, ...]
    scale: str = "log"
    when: tuple[tuple[str, object], ...] = ()


@dataclass
class NoFlags:
    """Of an optimizer without settings of its own."""


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer, as far as the rest of the toolkit knows it. `own`, below, are the values of its
    own flags, by name.

    Attributes:
        summary: what it is, as docs/flags.md lists it.
        make: (groups, lr=, and each of `settings`) -> an optimizer that honours `found_inf`, see
            `utils.optim.factory.build_optimizer`.
        lr, weight_decay, momentum: defaults; momentum is None where that is no setting of it.
        nesterov: its momentum is Nesterov's.
        flags: a dataclass of `setting`s that no other optimizer has.
        needs: ELEMENTS, NORMS or MATRICES.
        takes_exchange: `make` also takes `exchange`, by which it gets from the other ranks what it
            needs and they do not repeat each other's work.
        whole_state: how the keys of its state begin that belong to a whole parameter, whatever
            their shape; other entries of the parameter's shape have a value for each element.
        group_state: keys of a parameter group that its steps change, such as a count of them.
        capturable: a CUDA graph can hold its step: the host decides nothing and counts nothing.
        scaling: how its learning rate goes with the batch, LINEAR or SQUARE_ROOT.
        ranges: setting -> its ranges in a search.
        first_steps: a remark on the time of its first steps, where they take longer.
    """

    summary: str
    make: Callable[..., Optimizer]
    lr: float
    weight_decay: float
    momentum: float | None = None
    nesterov: bool = True
    flags: type = NoFlags
    needs: str = ELEMENTS
    takes_exchange: bool = False
    whole_state: tuple[str, ...] = ()
    group_state: tuple[str, ...] = ()
    capturable: bool = False
    scaling: str = SQUARE_ROOT
    ranges: Mapping[str, tuple[Range, ...]] = dataclasses.field(default_factory=dict)
    first_steps: str = ""

    @property
    def own(self) -> tuple[str, ...]:
        """Settings that no other optimizer has."""
        return tuple(field.name for field in dataclasses.fields(self.flags))

    @property
    def settings(self) -> tuple[str, ...]:
        """What `make` takes of the settings besides the learning rate."""
        return (() if self.momentum is None else ("momentum",)) + self.own

    @property
    def can_be_divided(self) -> bool:
        """Whether it can step parameters of which each rank has a part."""
        return self.needs == ELEMENTS or self.takes_exchange

    def values_of(self, settings) -> dict[str, object]:
        """`own` of an object with the settings of all optimizers."""
        return {name: getattr(settings, name) for name in self.own}

    def defaults(self, **own) -> dict[str, float | None]:
        """Learning rate, weight decay and momentum unless others are asked for."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}

    def own_defaults(self, **own) -> dict[str, object]:
        """Defaults of its own flags that depend on others of them."""
        return {}

    def lr_scaling(self, **own) -> str:
        """`scaling`, unless its own settings make it another."""
        return self.scaling

    def products(self, precision: str) -> dict[str, object]:
        """Arguments of `make` that follow from the precision of the training."""
        return {}

    def advice(self, **own) -> str:
        """What makes its steps cheaper, for a run in which they take too much of the time."""
        return ""
