"""Which process trains which worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..errors import UserError


@dataclass(frozen=True)
class Workers:
    """The parts into which every training step is divided, and those that this process trains. With
    local steps a part belongs to a worker, otherwise to a process.

    Attributes:
        size: the number of all workers.
        own: the numbers of those of this process.
        counts: how many each process has, in order of rank.
    """

    size: int
    own: range
    counts: tuple[int, ...]

    @classmethod
    def divide(cls, size: int, rank: int, ranks: int) -> Workers:
        """Neighbours go to the same process; their numbers differ by one at most.

        Raises:
            UserError: there are more processes than workers.
        """
        if ranks > size:
            raise UserError(
                f"--local_workers {size} is less than the {ranks} processes: start fewer "
                "processes, or take more workers"
            )
        borders = [size * number // ranks for number in range(ranks + 1)]
        counts = tuple(end - start for start, end in pairwise(borders))
        return cls(size, range(borders[rank], borders[rank + 1]), counts)
