"""Communication between the ranks, as an interface for code that knows nothing of processes.

Code that needs the other ranks (NGD's shared updates, SyncBatchNorm, the policy of meta-mixup, a
cache that one rank builds) is handed an `Exchange`. The one here is for a single process and
returns what it is given; the real one is in `utils/distributed/exchange.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a whole tensor that a rank holds: [start, end)."""

    shape: torch.Size  # of the whole tensor
    start: int
    end: int

    def to_json(self) -> dict[str, list[int]]:
        return {"shape": list(self.shape), "offset": [self.start] + [0] * (len(self.shape) - 1)}


def add_in_order(rows: Tensor) -> Tensor:
    """(m, n) -> (n,)."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


class Exchange:
    """Of a single process.

    All methods but `rows`, `shape`, `is_divided` and `part` are collective: every rank calls them,
    in the same order, with tensors of the same shape and dtype, on the device that it computes on
    or on the CPU. None changes what it is given, unless its name ends in `_`.

    Attributes:
        rank, size: the number of this process, from 0, and how many there are.
    """

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over the ranks, with the same bits on all of them."""
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Elementwise mean over the ranks, of floating-point tensors; the same bits on all."""
        return tensor

    def sum_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum of the rows of all ranks, (n,). They are added in order of rank and of row, so that
        the same rows give the same bits however they are spread over ranks.

        Args:
            rows: (this rank's count, n).
            counts: rows of each rank, 1 or more.
        """
        return add_in_order(rows)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in order of rank."""
        return [tensor]

    def gather_json(self, value: Any) -> list:
        """The JSON values of all ranks, in order of rank, of any length; nothing is pickled. Tuples
        become lists, and keys of dicts strings. The host waits.

        Raises:
            TypeError: JSON cannot represent the value; raised before this rank communicates.
        """
        return [value]

    def barrier(self) -> None:
        """Returns when all ranks have called it. The host waits."""

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Rank 0 runs the body first, then the first rank of every other machine, then the rest:
        one builds what the others then find. There is no timeout."""
        yield

    # ---- parameters that are sharded among the ranks (FSDP) -----------------------------------

    def rows(self, parameter: Tensor) -> Rows | None:
        """The rows of the whole parameter that this rank holds; None: it is not sharded."""
        return None

    def shape(self, parameter: Tensor) -> torch.Size:
        """Of the whole parameter."""
        rows = self.rows(parameter)
        return parameter.shape if rows is None else rows.shape

    def is_divided(self, parameter: Tensor) -> bool:
        """Equal on all ranks, even if one of them has all rows and the others none."""
        return self.rows(parameter) is not None

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Gathers the rows of all ranks of `tensor`, whose first dimension is sharded like that of
        `parameter`; its other dimensions may differ."""
        return tensor

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, a view."""
        rows = self.rows(parameter)
        return whole if rows is None else whole[rows.start : rows.end]
