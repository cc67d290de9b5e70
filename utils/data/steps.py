"""Cuts an epoch into optimizer steps, these into the parts of the ranks, and those into
micro-batches. Works on positions only; no sample is read here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ..errors import UserError
from ..mixup.mixing import Mixing
from ..pieces import has_lone_last, piece_borders, piece_count


class Piece(NamedTuple):
    """A micro-batch, as positions in the order of an epoch."""

    place: slice  # of its samples
    first: int  # position of the first sample of its optimizer step
    step_samples: int  # samples in that step
    ends_step: bool  # the last micro-batch of the step on this rank
    # Does not count. All ranks run equally many micro-batches, for which a short step may have too
    # few samples; a filler is empty, or has the fewest samples that a micro-batch can have.
    filler: bool = False

    @property
    def in_step(self) -> slice:
        """Positions of its samples within the step."""
        return slice(self.place.start - self.first, self.place.stop - self.first)


class Steps:
    """The optimizer steps of an epoch, and the micro-batches of one rank.

    Args:
        total: number of samples.
        batch_size: samples in a micro-batch.
        step_size: samples in an optimizer step, of all ranks.
        shuffle: for training: a new order every epoch.
        mixing: how samples are mixed with each other; None: not at all.
        rank, ranks: number of this process, and how many share every optimizer step.
        least: samples that a rank's part must have: 2 where BatchNorm needs several, else 1.
        drop_last: training leaves out a last step that is smaller than the others.
    """

    def __init__(
        self,
        total: int,
        *,
        batch_size: int,
        step_size: int,
        shuffle: bool = False,
        mixing: Mixing | None = None,
        rank: int = 0,
        ranks: int = 1,
        least: int = 2,
        drop_last: bool = False,
    ):
        self.total, self.batch_size, self.step_size = total, batch_size, step_size
        self.rank, self.ranks, self.least = rank, ranks, least
        self.shuffle, self.mixing, self.drop_last = shuffle, mixing, drop_last
        if not self.samples and total:
            raise UserError(
                f"--drop_last would skip all {total:,} training samples, because an optimizer step "
                f"takes {step_size:,}; leave the flag out, or lower --batch_size or --global_batch"
            )
        if mixing is not None:
            mixing.check(self.samples, min(self.step_size, self.samples))
        self.block = block = getattr(mixing, "block", 1)  # as set by the user
        if ranks > 1 and self.step_size < ranks * block:
            most = max(1, self.step_size // (1 if mixing is None else 2))
            raise UserError(
                f"an optimizer step of {self.step_size} samples is too small for {ranks} processes "
                f"or workers: start at most {most}, or give a larger step (--global_batch)"
            )

    @property
    def samples(self) -> int:
        """Samples in an epoch. Training leaves out a last step of a single sample, or with
        `drop_last` of any that is not whole; these are other samples in every epoch."""
        if self.drop_last and self.shuffle:
            return self.total - self.total % self.step_size
        return self.total - (self.shuffle and has_lone_last(self.total, self.step_size))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.step_size)

    def pieces(self, epoch: int, start_step: int) -> Iterator[Piece]:
        """This rank's micro-batches of an epoch, from optimizer step `start_step` on."""
        for first in range(start_step * self.step_size, self.samples, self.step_size):
            n = min(self.step_size, self.samples - first)
            yield from self.pieces_of_step(first, n, self.batch_size)

    def pieces_of_step(self, first: int, n: int, size: int) -> Iterator[Piece]:
        """This rank's micro-batches, of `size` samples, of the step with `n` samples that begins at
        `first`."""
        block = max(getattr(self.mixing, "block", 1), self.least if n < 2 * self.ranks else 1)
        borders = rank_borders(n, block, self.ranks)
        parts = [
            list(pairwise(piece_borders(end - start, size))) for start, end in pairwise(borders)
        ]
        own, start = parts[self.rank], first + borders[self.rank]
        count = max(map(len, parts))
        for number in range(count):
            ends, filler = number == count - 1, number >= len(own)
            place = slice(first, first + min(self.least, n) if self.least > 1 else first)
            if not filler:
                place = slice(start + own[number][0], start + own[number][1])
            yield Piece(place, first, n, ends, filler)

    # ---- other micro-batches of the same steps, for --auto_batch --------------------------------

    batch_flag = "--batch_size"  # what sets `micro_batch`

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch."""
        return self.batch_size

    @property
    def usual_batch(self) -> int:
        """Samples in all micro-batches but the last one of an epoch, for a process alone that does
        not accumulate."""
        return min(self.batch_size, self.step_size, self.samples)

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step, of each rank."""
        return -(-self.rank_batch // self.micro_batch)

    @property
    def rank_batch(self) -> int:
        """The most samples of an optimizer step that one rank has."""
        borders = rank_borders(self.step_size, self.block, self.ranks)
        return max(end - start for start, end in pairwise(borders))

    def cuts(self) -> list[int]:
        """Sizes that `cut` takes, the largest first."""
        least = min(2 if self.mixing is not None else self.least, self.rank_batch)
        return [size for size in micro_batch_sizes(self.rank_batch, self.block) if size >= least]

    def cut(self, size: int) -> None:
        """Cuts the steps into micro-batches of `size` samples. Samples are mixed within blocks of
        --mixup_block, or within a micro-batch where that is smaller."""
        self.batch_size = size
        if self.mixing is not None:
            self.mixing = self.mixing.with_block(min(self.block, size))

    def resize(self, batch_size: int, step_size: int) -> None:
        """Changes the size of micro-batches and of steps."""
        self.batch_size, self.step_size = batch_size, step_size

    def largest(self) -> int:
        """The n for which no micro-batch of this rank needs more memory than `trial(n)`."""
        start = (self.steps_per_epoch - 1) * self.step_size
        sizes = min(self.step_size, self.samples), self.samples - start
        pieces = [piece for n in sizes for piece in self.pieces_of_step(0, n, self.batch_size)]
        return max(piece.place.stop - piece.place.start for piece in pieces)


def rank_borders(n: int, block: int, ranks: int) -> list[int]:
    """Positions in a step of n samples at which each rank's part begins, and the end of the last.

    Parts are as equal as possible without cutting a block of samples that are mixed with each other
    (see mixup/mixing.py). In a step of few samples a rank may have none.
    """
    blocks = piece_count(n, block)
    return [block * (blocks * rank // ranks) for rank in range(ranks)] + [n]


def micro_batch_sizes(n: int, block: int = 1) -> list[int]:
    """Sizes, the largest first, for the n samples that one rank has of an optimizer step.

    Each divides n evenly, so that all micro-batches are alike. Where divisors lie more than a
    factor of two apart (n may be prime), other sizes fill the gap; the last micro-batch is then
    smaller.

    Args:
        block: samples that are mixed with each other. Sizes above it are multiples of it; those
            below divide it if possible.
    """
    blocks = [block * count for count in _even(-(-n // block))]
    return blocks + _even(block)[1:]


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`; 1 if there is none."""
    return max((size for size in range(1, most + 1) if n % size == 0), default=1)


def _even(n: int) -> list[int]:
    sizes = [n]
    while (last := sizes[-1]) > 1:
        below = next(size for size in range(last - 1, 0, -1) if n % size == 0)
        sizes.append(below if 2 * below >= last else -(-last // 2))
    return sizes
