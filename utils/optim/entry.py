"""What the rest of the toolkit knows of an optimizer; see table.py for how to add one.

`--help` reads the entries, so this module and the optimizers' files import PyTorch only when they
make an optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..setting import setting

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..exchange import Exchange

# Declares a flag of an optimizer; `group` is the heading in --help.
optimizer_flag = partial(setting, group="optimizer and learning rate")

# What a step needs of a parameter in order to change one element: that element's gradient, norms of
# the whole parameter, or the whole parameter as a matrix. Matters to FSDP, which shards parameters.
ELEMENTS, NORMS, MATRICES = "elements", "norms", "matrices"

# How the learning rate scales with the batch (Goyal et al., 2017; Malladi et al., 2022).
LINEAR, SQUARE_ROOT = "linear", "square root"


@dataclass(frozen=True)
class Range:
    """Values of a setting that a search (tuning/) tries, unless its space has others.

    Attributes:
        low, high: its ends.
        grid: points of --sampler grid.
        scale: "log", "linear" or "int".
        when: (setting, value) pairs; the range applies only if all of these settings are so.
    """

    low: float
    high: float
    grid: tuple[float, ...]
    scale: str = "log"
    when: tuple[tuple[str, object], ...] = ()


@dataclass
class NoFlags:
    """The flags of an optimizer that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer in the table. `own` are the names of its own flags; as the argument `**own` of
    methods, their values by name. `settings` are the names of all settings that `make` takes
    besides the learning rate.

    Attributes:
        summary: what it is, as in docs/flags.md.
        make: (groups, lr=, and each of `settings`) -> an optimizer that honours `found_inf`, see
            `utils.optim.factory.build_optimizer`.
        lr, weight_decay, momentum: defaults; lr is None if the user has to give it, momentum if the
            optimizer has no such setting.
        lr_of_transformers: the default learning rate for Transformers, where it is another.
        nesterov: its momentum is Nesterov's.
        clip: the bound of the gradient's norm if the user sets none; None: no bound.
        flags: a dataclass of the `setting`s that only this optimizer has, or few others.
        needs: ELEMENTS, NORMS or MATRICES.
        takes_exchange: `make` also takes `exchange`, with which the optimizer gathers what it needs
            of sharded parameters and shares work with the other ranks.
        takes_heads: `make` also takes `heads`, the parameters of the classifier.
        whole_state: prefixes of state keys whose values belong to the whole parameter, whatever
            their shape; any other value of the parameter's shape has one number per element.
        group_state: keys of a parameter group that steps change, such as a step count.
        capturable: a CUDA graph can hold its step: the host decides nothing and counts nothing, or
            the optimizer is a CountsOnHost (engines/graphed_step.py).
        scaling: how its learning rate scales with the batch, LINEAR or SQUARE_ROOT.
        ranges: setting -> its ranges in a search.
        first_steps: a remark for tables of step times, if its first steps take longer; else empty.
    """

    summary: str
    make: Callable[..., Optimizer]
    lr: float | None
    weight_decay: float
    momentum: float | None = None
    lr_of_transformers: float | None = None
    nesterov: bool = True
    clip: float | None = None
    flags: type = NoFlags
    needs: str = ELEMENTS
    takes_exchange: bool = False
    takes_heads: bool = False
    whole_state: tuple[str, ...] = ()
    group_state: tuple[str, ...] = ()
    capturable: bool = False
    scaling: str = SQUARE_ROOT
    ranges: Mapping[str, tuple[Range, ...]] = dataclasses.field(default_factory=dict)
    first_steps: str = ""

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the settings in `flags`."""
        return tuple(field.name for field in dataclasses.fields(self.flags))

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that `make` takes besides the learning rate."""
        return (() if self.momentum is None else ("momentum",)) + self.own

    @property
    def can_be_divided(self) -> bool:
        """Whether it can step parameters that are sharded among the ranks."""
        return self.needs == ELEMENTS or self.takes_exchange

    def values_of(self, settings) -> dict[str, object]:
        """The values of `own`, from an object with the settings of all optimizers."""
        return {name: getattr(settings, name) for name in self.own}

    def defaults(self, transformer: bool = False, **own) -> dict[str, float | None]:
        """Learning rate, weight decay and momentum that are used if the user sets none, for a
        Transformer (texts or a ViT) if `transformer`."""
        lr = (self.lr_of_transformers if transformer else None) or self.lr
        return {"lr": lr, "weight_decay": self.weight_decay, "momentum": self.momentum}

    def own_defaults(self, **own) -> dict[str, object]:
        """Defaults of its own flags that depend on others of them."""
        return {}

    def lr_scaling(self, **own) -> str:
        """`scaling`, unless its own settings change it."""
        return self.scaling

    def is_capturable(self) -> bool:
        """`capturable`, unless that depends on what is installed."""
        return self.capturable

    def remark(self, groups: list[dict], exchange: Exchange | None = None) -> str:
        """A line on what computes its steps, if its name does not say so."""
        return ""

    def products(self, precision: str) -> dict[str, object]:
        """Further arguments of `make` that depend on --precision, such as how exactly NGD computes
        its matrix products."""
        return {}

    def advice(self, **own) -> str:
        """How to make its steps cheaper, for a run in which they take too much time."""
        return ""
