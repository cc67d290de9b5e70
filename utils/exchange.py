"""What processes that train together tell each other, as seen by code that knows of no processes.

Whoever needs the other ranks (NGD's shared updates, BatchNorm over all of them, the policy of
meta-mixup, a cache that one rank builds) is handed an `Exchange`. This one is of a process alone,
and returns what it is given; the real one is in `utils/distributed/exchange.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows of a whole tensor a rank holds, [start, end)."""

    shape: torch.Size  # of the whole
    start: int
    end: int

    def to_json(self) -> dict[str, list[int]]:
        return {"shape": list(self.shape), "offset": [self.start] + [0] * (len(self.shape) - 1)}


class Exchange:
    """Of one process alone.

    All methods but `rows`, `shape`, `is_divided` and `part` are collective: every rank calls them,
    in the same order, with tensors of the same shape and dtype, on the device that it computes on
    or on the CPU. None changes what it is given, unless its name ends in `_`.

    Attributes:
        rank, size: which of how many processes this is, from 0.
    """

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the ranks, elementwise; the same bits on all of them."""
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Likewise, of floating-point tensors."""
        return tensor

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """All ranks get what rank `source` has."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Those of all ranks, in their order, on all ranks."""
        return [tensor]

    def gather_json(self, value: Any) -> list:
        """Values of JSON of all ranks, in their order, on all ranks; never by pickle. The ranks may
        give values of any length. Tuples become lists, and keys of dicts strings. The host waits.

        Raises:
            TypeError: JSON cannot hold the value; on this rank, before it asks the others.
        """
        return [value]

    def barrier(self) -> None:
        """All ranks have come here. The host waits."""

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Rank 0 goes through its body first, then the first rank of every other machine, then
        the rest: for what one builds and the others find. However long it takes."""
        yield

    # ---- parameters that are divided among the ranks (FSDP) ---------------------------------

    def rows(self, parameter: Tensor) -> Rows | None:
        """Which rows of the whole parameter this rank holds; None: it is not divided."""
        return None

    def shape(self, parameter: Tensor) -> torch.Size:
        """Of the whole parameter."""
        rows = self.rows(parameter)
        return parameter.shape if rows is None else rows.shape

    def is_divided(self, parameter: Tensor) -> bool:
        """The same on all ranks, also where one of them has all rows and others none."""
        return self.rows(parameter) is not None

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """The rows of all ranks of `tensor`, whose first dimension is divided as that of
        `parameter` is; the others may be any."""
        return tensor

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The rows of this rank; a view."""
        rows = self.rows(parameter)
        return whole if rows is None else whole[rows.start : rows.end]
