"""The common part of the loaders of pictures and of texts.

What a batch holds depends on (seed, epoch, step) alone: the order of an epoch and the choices of
the augmentation are drawn for the whole epoch at its start, and each micro-batch takes its slice.
So the same samples, augmented alike, are trained on with any accumulation, and a run is resumed
at any step without replaying the ones before. How samples are mixed is drawn likewise, for each
optimizer step.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from ..mixup.mixing import Draws
from ..to_device import to_device
from .batch import (
    MIX_STREAM,
    ORDER_STREAM,
    Batch,
    one_ahead,
    random_generator,
    trial_draws,
)
from .class_sampler import ClassSampler
from .steps import Piece, Steps


class Loader(Steps, ABC):
    """Iterates over samples and labels in batches that are ready on the device.

    On a GPU the next batch is made on a side stream during training on the current one. On a CPU a
    batch is made on request, which costs a fraction of a per cent of a step.

    Args:
        labels: (samples,) int64.
        device: where the batches are needed.
        seed: of the order, and of all else that is drawn.
        hold_out: samples that the first epochs leave out; None: there are none.
        repeats: copies in an epoch of each sample that it has (see `repeated`).
        by_class: a training epoch has as many samples of each class (see ClassSampler).
        options: see Steps.
    """

    features: Tensor | None = None  # what batches have for inputs; see `with_features`
    workers = 0  # processes that read ahead
    turns = 1  # loaders that are used in turn, and share these processes

    def __init__(
        self,
        labels: np.ndarray,
        *,
        device: torch.device,
        seed: int = 0,
        hold_out: HoldOut | None = None,
        repeats: int = 1,
        by_class: bool = False,
        **options,
    ):
        super().__init__(len(labels), **options)
        self.device, self.seed, self.hold_out = device, seed, hold_out
        self.repeats = repeats
        self.class_sampler = ClassSampler(labels) if by_class else None
        self._suits_graphs = False
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64))

    @abstractmethod
    def _inputs(
        self, epoch: int, order: np.ndarray, pieces: list[Piece]
    ) -> tuple[Generator, Callable[[np.ndarray], Tensor | tuple]]:
        """A generator of the inputs of these micro-batches, and a function that makes the inputs at
        given positions in the order."""

    def order(self, epoch: int) -> np.ndarray:
        """(samples,) int64: the samples of an epoch in the order in which they are visited."""
        if not self.shuffle:
            return np.arange(len(self.labels))
        return self._permutation(epoch, random_generator(self.seed, ORDER_STREAM, epoch))

    def _permutation(self, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """(samples,) int64: the samples of a training epoch, in random order."""
        if self.class_sampler is not None:
            among = None if self.hold_out is None else self.hold_out.trained(epoch)
            order = self.class_sampler.draw(generator, among)
        else:
            order = generator.permutation(len(self.labels))
            if self.hold_out is not None:
                order = self.hold_out.replace(order, epoch, generator)
        return repeated(order[: self.samples], self.repeats, self.step_size)

    def visited(self) -> np.ndarray:
        """(n,) int64: the samples that this rank evaluates, in the order of its batches."""
        order, pieces = self.order(0), self.pieces(0, 0)
        return np.concatenate([order[:0], *(order[p.place] for p in pieces if not p.filler)])

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Generator[Batch]:
        """The micro-batches of one epoch, from optimizer step `start_step` (of the epoch) on."""
        makers = self._makers(epoch, start_step)
        if self.device.type == "cuda":
            return one_ahead(makers, self.device)
        return (make() for make in makers)

    def of_rank(self, rank: int) -> Loader:
        """The same loader with the part of another rank."""
        other = copy.copy(self)
        other.rank = rank
        return other

    def in_order(self, rank: int, ranks: int) -> Loader:
        """Each sample once, in a fixed order, unmixed, divided among these ranks. What is augmented
        stays so."""
        other = copy.copy(self)
        other.rank, other.ranks, other.shuffle, other.mixing = rank, ranks, False, None
        other.resize(self.batch_size, self.step_size)
        return other

    def with_features(self, features: Tensor | None) -> Loader:
        """The same batches, with rows of `features`, (samples, ...), for inputs; None: with the
        inputs themselves."""
        other = copy.copy(self)
        other.features = features
        return other

    def suit_graphs(self, wanted: bool = True) -> None:
        """Makes batches that suit CUDA graphs, or ordinary ones again. Pictures, from the next
        `epoch` on: inputs are left to `made`, if the device alone can make them, so that a graph
        includes the augmentation. Texts, from the next batch on: see TextLoader."""
        self._suits_graphs = wanted

    def made(self, batch: Batch) -> Batch:
        """The batch with its inputs, if they were deferred."""
        return batch

    def _makers(self, epoch: int, start_step: int) -> Iterator[Callable[[], Batch]]:
        order = self.order(epoch)
        pieces = list(self.pieces(epoch, start_step))
        inputs, inputs_at = self._rows_or_inputs(epoch, order, pieces)
        draws = self._draws(epoch, pieces, start_step)
        with closing(inputs):
            for piece in pieces:

                def make(piece=piece) -> Batch:
                    targets = self._targets(order[piece.place])
                    drawn, clean = next(draws), None
                    per_micro_batch = drawn is not None and drawn.clean_per_micro_batch
                    needs_clean = per_micro_batch or piece.ends_step
                    if drawn and drawn.clean_samples and needs_clean:
                        after = self._after(piece, len(order), drawn.clean_samples)
                        if not per_micro_batch:
                            after = np.array_split(after, self.ranks)[self.rank]
                        # Not read ahead: they are few, and not every step has any.
                        clean = inputs_at(after), self._targets(order[after])
                    mix_plan = drawn and drawn.plan(targets)
                    n, ends = piece.step_samples, piece.ends_step
                    return Batch(next(inputs), targets, n, ends, mix_plan, clean, piece.filler)

                yield make

    def _rows_or_inputs(self, epoch: int, order: np.ndarray, pieces: list[Piece]):
        if (features := self.features) is None:
            return self._inputs(epoch, order, pieces)
        parts = (self._chosen(features, order[piece.place]) for piece in pieces)
        return parts, lambda places: self._chosen(features, order[places])

    def _draws(self, epoch: int, pieces: list[Piece], start_step: int) -> Iterator[Draws | None]:
        """The draws for mixing of each micro-batch."""
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
        """Positions in the order of `count` samples outside the step of `piece`, or of all there
        are: those that come next, then those at the start of the epoch. They were trained on
        longest ago."""
        n = piece.step_samples
        return (piece.first + n + np.arange(min(count, samples - n))) % samples

    def _targets(self, index: np.ndarray) -> Tensor:
        return self._chosen(self.labels, index)

    def _chosen(self, rows: Tensor, index: np.ndarray) -> Tensor:
        chosen = rows.index_select(0, to_device(index, rows.device))
        return to_device(chosen, self.device)

    # ---- how much memory a micro-batch needs ----------------------------------------------------

    def trial(self, n: int) -> Batch:
        """A step of a single micro-batch, of the n samples that need the most memory, augmented and
        mixed like training batches."""
        targets, clean = self._targets(self._heaviest(n)), None
        drawn = trial_draws(self.mixing, n)
        if drawn and drawn.clean_samples:
            count = drawn.clean_samples
            if not drawn.clean_per_micro_batch:
                count = -(-count // self.ranks)
            clean = self._trial_inputs(count), self._targets(self._heaviest(count))
        mix_plan = drawn and drawn.plan(targets)
        return Batch(self._trial_inputs(n), targets, n, True, mix_plan, clean)

    def _trial_inputs(self, n: int) -> Tensor | tuple:
        samples = self._heaviest(n)
        _, inputs_at = self._rows_or_inputs(0, samples, [])
        return inputs_at(np.arange(n))

    def _heaviest(self, n: int) -> np.ndarray:
        """(n,) int64: samples, repeated if there are fewer than n."""
        return np.arange(n) % len(self.labels)


def repeated(order: np.ndarray, repeats: int, step_size: int) -> np.ndarray:
    """The first of the samples, each `repeats` times: as many as before.

    The copies of a sample, which differ in their augmentation, lie in the same optimizer step, as
    far apart as possible, and so on different ranks if there are several; those of a sample at the
    end of a step lie in two steps unless `step_size` is a multiple of `repeats`. Hoffer et al.,
    "Augment your batch" (2020), and the sampler of DeiT, which splits each step among the ranks
    likewise.

    Args:
        order: (samples,) int64.
        step_size: samples in an optimizer step.
    """
    if repeats == 1:
        return order
    several = np.repeat(order[: -(-len(order) // repeats)], repeats)[: len(order)]
    for first in range(0, len(several), step_size):
        step = several[first : first + step_size]
        step[:] = np.concatenate([step[copy::repeats] for copy in range(repeats)])
    return several


class HoldOut:
    """Samples that are held out during the first epochs; without `release_from`, during all.

    In each of these epochs every held-out sample is replaced by another one, drawn at random, which
    the epoch then visits twice. So all epochs have equally many samples and steps.

    Args:
        index: (n,) int64: the held-out samples.
        total: number of all samples.
    """

    def __init__(self, index: np.ndarray, total: int):
        self._is_held_out = np.zeros(total, bool)
        self._is_held_out[index] = True
        self._others = np.flatnonzero(~self._is_held_out)
        self._until: int | None = None

    def release_from(self, epoch: int) -> None:
        """The held-out samples are trained on from this epoch on."""
        self._until = epoch

    def trained(self, epoch: int) -> np.ndarray | None:
        """(m,) int64: the samples that are not held out in this epoch; None: none is."""
        return None if self._until is not None and epoch >= self._until else self._others

    def replace(self, order: np.ndarray, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """The order of an epoch, (samples,) int64, with each held-out sample replaced."""
        if self.trained(epoch) is None:
            return order
        held_out = self._is_held_out[order]
        substitutes = generator.choice(self._others, held_out.sum(), replace=False)
        order = order.copy()
        order[held_out] = substitutes
        return order
