"""Batches for training and evaluation: what the loaders of pictures and of texts share.

What a batch holds depends on (seed, epoch, step) alone: the order of an epoch and the choices of
the augmentation are drawn for the whole epoch at its start, and each micro-batch takes its slice.
So the same samples, augmented alike, are trained on with any accumulation, and a run is resumed
at any step without replaying the ones before. How samples are mixed is drawn likewise, for each
optimizer step.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from utils.data.micro_batches import micro_batch_sizes
from utils.errors import UserError
from utils.to_device import to_device

# One stream of random numbers each, so that none depends on how much another one draws.
ORDER_STREAM, AUGMENT_STREAM, MIX_STREAM = 0, 1, 2
TRIAL_DRAWS = 32  # some of them mix, however rarely that is


class Batch(NamedTuple):
    """One micro-batch on the device."""

    # (n, channels, height, width) float32, normalised; of texts PackedTokens (see utils/packed.py);
    # deferred ones: what `Loader.made` makes them of
    inputs: Tensor | tuple
    targets: Tensor  # (n,) int64
    step_samples: int  # samples in the whole optimizer step that this micro-batch belongs to
    ends_step: bool  # the last micro-batch of that step
    mixing: object | None = None  # what `Draws.plan` made for it; None: it is not mixed
    # Inputs and targets of samples apart from this step, where the mixing learns from such: with
    # the last micro-batch of a step, or with every one (see `Draws`).
    clean: tuple[Tensor | tuple, Tensor] | None = None
    filler: bool = False  # see Piece

    def tensors(self) -> Iterator[Tensor]:
        """All that lies on the device."""
        return _tensors(self)


def _tensors(part) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from _tensors(inner)


class Piece(NamedTuple):
    """A micro-batch in an epoch's order."""

    place: slice  # of its samples
    first: int  # place of the first sample of its optimizer step
    step_samples: int  # samples of that step
    ends_step: bool  # the last one of this rank
    # Not to be counted, and empty unless a micro-batch must have some samples: all ranks go through
    # equally many, which the samples of a short step may not suffice for.
    filler: bool = False

    @property
    def in_step(self) -> slice:
        """Its samples, counted from the step's first one."""
        return slice(self.place.start - self.first, self.place.stop - self.first)


class Draws(Protocol):
    """What was drawn for the samples of a step (see utils/mixup/mixing.py)."""

    clean: int  # samples of the clean batch that goes with the step; 0: none
    clean_each: bool  # with every micro-batch, not with the last one alone

    def slice(self, piece: slice): ...  # of a micro-batch, counted from the step's first sample

    def filler(self, n: int): ...  # of n samples that do not count

    def plan(self, targets: Tensor): ...  # on the device


class Mixing(Protocol):
    """Draws for an optimizer step how its samples are mixed (see utils/mixup/mixing.py)."""

    def draw(
        self, n: int, epoch: int, step: int, generator: np.random.Generator
    ) -> Draws | None: ...

    def check(self, samples: int, step_size: int) -> None: ...


def random_generator(seed: int, stream: int, *position: int) -> np.random.Generator:
    """A generator that depends on its arguments alone: non-negative integers."""
    return np.random.default_rng([seed, stream, *position])


class Loader(ABC):
    """Iterates over samples and labels in batches that are ready on the device.

    On a GPU the next batch is made on a side stream while the current one trains. On a CPU a batch
    is made when it is asked for: that costs a fraction of a per cent of a step.

    Args:
        labels: (samples,) int64.
        batch_size: samples in a micro-batch.
        step_size: samples in an optimizer step.
        device: where the batches are needed.
        shuffle: a new order every epoch.
        seed: of the order, and of all else that is drawn.
        mixing: how samples are mixed with each other; None: not at all.
        rank, ranks: which part of every optimizer step is this process's, of how many.
        least: samples that the part of a rank must have, 1 or 2: BatchNorm takes no single one.
    """

    def __init__(
        self,
        labels: np.ndarray,
        *,
        batch_size: int,
        step_size: int,
        device: torch.device,
        shuffle: bool,
        seed: int,
        mixing: Mixing | None,
        rank: int = 0,
        ranks: int = 1,
        least: int = 2,
    ):
        self.device, self.batch_size, self.step_size = device, batch_size, step_size
        self.rank, self.ranks, self.least = rank, ranks, least
        self.shuffle, self.seed, self.mixing = shuffle, seed, mixing
        self._deferred = False
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        if mixing is not None:
            mixing.check(self.samples, min(self.step_size, self.samples))
        self.block = block = getattr(mixing, "block", 1)  # the one that was asked for
        if ranks > 1 and self.step_size < ranks * block:
            what = f"blocks of --mixup_block {block}" if block > 1 else "samples"
            raise UserError(
                f"an optimizer step of {self.step_size} samples (--global_batch) has fewer {what} "
                f"than there are processes ({ranks})"
            )

    @abstractmethod
    def _inputs(
        self, epoch: int, order: np.ndarray, pieces: list[Piece]
    ) -> tuple[Generator, Callable[[np.ndarray], Tensor | tuple]]:
        """The inputs of the pieces, in turn, and a function that makes those at any places in the
        order."""

    @property
    def workers(self) -> int:
        """Processes that read for it."""
        return 0

    @property
    def samples(self) -> int:
        """Samples in an epoch. In training a last step of one sample is left out of its epoch
        (another sample every time): BatchNorm cannot take statistics of a batch of one."""
        n = len(self.labels)
        lone = self.shuffle and n > 1 and self.step_size > 1 and n % self.step_size == 1
        return n - 1 if lone else n

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.step_size)

    def order(self, epoch: int) -> np.ndarray:
        """(samples,) int64: the samples of an epoch in the order in which they are visited."""
        if not self.shuffle:
            return np.arange(len(self.labels))
        generator = random_generator(self.seed, ORDER_STREAM, epoch)
        return generator.permutation(len(self.labels))[: self.samples]

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """The micro-batches of one epoch, from optimizer step `start_step` (of the epoch) on."""
        makers = self._makers(epoch, start_step)
        if self.device.type == "cuda":
            return _one_ahead(makers, self.device)
        return (make() for make in makers)

    def defer(self) -> None:
        """From here on the inputs of an `epoch` come as what `made` makes them of by work of the
        device alone, where that can be: for a CUDA graph, which then holds the augmentation too."""
        self._deferred = self._can_defer

    @property
    def _can_defer(self) -> bool:
        return False

    def made(self, batch: Batch) -> Batch:
        """With its inputs, where they were deferred."""
        return batch

    def _makers(self, epoch: int, start_step: int) -> Iterator[Callable[[], Batch]]:
        order = self.order(epoch)
        pieces = list(self._pieces(epoch, start_step))
        inputs, inputs_at = self._inputs(epoch, order, pieces)
        draws = self._draws(epoch, pieces, start_step)
        with closing(inputs):
            for piece in pieces:

                def make(piece=piece) -> Batch:
                    targets = self._targets(order[piece.place])
                    drawn, clean = next(draws), None
                    if drawn and drawn.clean and (piece.ends_step or drawn.clean_each):
                        after = self._after(piece, len(order), drawn.clean)
                        if not drawn.clean_each:
                            after = np.array_split(after, self.ranks)[self.rank]
                        # Made here by hand: they are few, and not every step has any.
                        clean = inputs_at(after), self._targets(order[after])
                    mixing = drawn and drawn.plan(targets)
                    n, ends = piece.step_samples, piece.ends_step
                    return Batch(next(inputs), targets, n, ends, mixing, clean, piece.filler)

                yield make

    def _draws(self, epoch: int, pieces: list[Piece], start_step: int) -> Iterator[Draws | None]:
        """How each of the pieces is mixed."""
        step, drawn, drawn_for = start_step, None, -1
        for piece in pieces:
            if self.mixing is not None and step != drawn_for:
                drawn_for = step
                generator = random_generator(self.seed, MIX_STREAM, epoch, step)
                run_step = epoch * self.steps_per_epoch + step
                drawn = self.mixing.draw(piece.step_samples, epoch, run_step, generator)
            if drawn is not None and piece.filler:
                yield drawn.filler(piece.place.stop - piece.place.start)
            else:
                yield drawn and drawn.slice(piece.in_step)
            step += piece.ends_step

    def _after(self, piece: Piece, samples: int, count: int) -> np.ndarray:
        """Places in the order of `count` samples apart from the step that the micro-batch `piece`
        belongs to: those that come next, and then those of the epoch's start. They were trained on
        longest ago. Fewer where there are not as many."""
        n = piece.step_samples
        return (piece.first + n + np.arange(min(count, samples - n))) % samples

    def _pieces(self, epoch: int, start_step: int) -> Iterator[Piece]:
        """The micro-batches of an epoch from a step on."""
        for first in range(start_step * self.step_size, self.samples, self.step_size):
            n = min(self.step_size, self.samples - first)
            yield from self._pieces_of_step(first, n, self.batch_size)

    def _pieces_of_step(self, first: int, n: int, size: int) -> Iterator[Piece]:
        """Those of the step of `n` samples from `first` on that are this rank's, of `size`
        samples."""
        block = max(getattr(self.mixing, "block", 1), self.least if n < 2 * self.ranks else 1)
        borders = rank_borders(n, block, self.ranks)
        parts = [_micro_batches(end - start, size) for start, end in pairwise(borders)]
        own, start = parts[self.rank], first + borders[self.rank]
        count = max(map(len, parts))
        for number in range(count):
            ends, filler = number == count - 1, number >= len(own)
            place = slice(first, first + min(self.least, n) if self.least > 1 else first)
            if not filler:
                place = slice(start + own[number][0], start + own[number][1])
            yield Piece(place, first, n, ends, filler)

    # ---- other micro-batches of the same steps, for --auto_batch --------------------------------

    @property
    def micro_batch(self) -> int:
        """Samples of one."""
        return self.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step, of each process."""
        return -(-self.share // self.micro_batch)

    @property
    def share(self) -> int:
        """Samples that a process has of an optimizer step at most."""
        borders = rank_borders(self.step_size, self.block, self.ranks)
        return max(end - start for start, end in pairwise(borders))

    def cuts(self) -> list[int]:
        """What `cut` can be given, the largest micro-batches first."""
        least = min(2 if self.mixing is not None else self.least, self.share)
        return [size for size in micro_batch_sizes(self.share, self.block) if size >= least]

    def cut(self, size: int) -> None:
        """Cuts the steps into micro-batches of `size` samples. Those that are mixed with each
        other are as many as were asked for, or all of a micro-batch where it is smaller."""
        self.batch_size = size
        if self.mixing is not None:
            self.mixing.block = min(self.block, size)

    def resize(self, batch_size: int, step_size: int) -> None:
        """Other micro-batches, and other steps."""
        self.batch_size, self.step_size = batch_size, step_size

    def largest(self) -> int:
        """No micro-batch of this process needs more memory than `trial` of so many samples."""
        start = (self.steps_per_epoch - 1) * self.step_size
        sizes = min(self.step_size, self.samples), self.samples - start
        pieces = [piece for n in sizes for piece in self._pieces_of_step(0, n, self.batch_size)]
        return max(piece.place.stop - piece.place.start for piece in pieces)

    def trial(self, n: int) -> Batch:
        """A step of one micro-batch of the n samples that need the most memory, augmented and mixed
        as training batches are."""
        targets, clean = self._targets(self._heaviest(n)), None
        drawn = self._trial_draws(n)
        if drawn and drawn.clean:
            count = drawn.clean if drawn.clean_each else -(-drawn.clean // self.ranks)
            clean = self._trial_inputs(count), self._targets(self._heaviest(count))
        mixing = drawn and drawn.plan(targets)
        return Batch(self._trial_inputs(n), targets, n, True, mixing, clean)

    def _trial_inputs(self, n: int) -> Tensor | tuple:
        samples = self._heaviest(n)
        _, inputs_at = self._inputs(0, samples, [])
        return inputs_at(np.arange(n))

    def _trial_draws(self, n: int) -> Draws | None:
        """The first ones that mix by what is learned, where anything is: it needs the most."""
        drawn = None
        for seed in range(TRIAL_DRAWS if self.mixing is not None else 0):
            found = self.mixing.draw(n, 0, 0, np.random.default_rng(seed))
            drawn = drawn or found
            if found is not None and found.clean:
                return found
        return drawn

    def _heaviest(self, n: int) -> np.ndarray:
        """(n,) int64: samples, some more than once where there are fewer."""
        return np.arange(n) % len(self.labels)

    def _targets(self, index: np.ndarray) -> Tensor:
        targets = self.labels.index_select(0, to_device(index, self.labels.device))
        if targets.device.type != self.device.type:
            targets = targets.pin_memory().to(self.device, non_blocking=True)
        return targets


def rank_borders(n: int, block: int, ranks: int) -> list[int]:
    """Where in a step of n samples the part of each rank begins, and where the last one ends.

    Parts are as equal as they can be without cutting a block of samples that are mixed with each
    other (see mixup/mixing.py). In a step of few samples a rank may have none.
    """
    whole, rest = divmod(n, block)
    blocks = max(1, whole + (rest > 1))  # a lone last sample belongs to the block before it
    return [block * (blocks * rank // ranks) for rank in range(ranks)] + [n]


def _micro_batches(n: int, size: int) -> list[tuple[int, int]]:
    """Borders of the pieces of `size` samples; a lone last sample joins the piece before it. None
    where there are no samples."""
    starts = list(range(0, n, size))
    if len(starts) > 1 and size > 1 and n - starts[-1] == 1:
        starts.pop()
    return list(pairwise([*starts, n]))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: the allocator keeps the free memory of each stream for that stream."""
    return torch.cuda.Stream(device)


def _one_ahead(makers, device: torch.device) -> Iterator[Batch]:
    """Makes each batch on a side stream while the one before it is being used."""
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the resident images were copied there
    ahead = None
    for make in chain(makers, [None]):
        ready = ahead
        if make is not None:
            with torch.cuda.stream(side):
                ahead = make(), side.record_event()
        if ready is not None:
            batch, made = ready
            training = torch.cuda.current_stream(device)
            training.wait_event(made)  # the device waits, the host does not
            for tensor in batch.tensors():
                tensor.record_stream(training)
            yield batch
