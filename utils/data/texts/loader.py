"""Batches of texts of similar lengths, so that hardly anything is computed for padding."""

import functools
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...packed import PackedTokens, pack
from ..batch import ORDER_STREAM, random_generator
from ..loader import Loader
from ..steps import Piece


class EpochSteps(NamedTuple):
    """The optimizer steps of an epoch."""

    epoch: int
    order: np.ndarray  # (samples,) int64: the samples, as they are visited
    borders: np.ndarray  # (steps + 1,) int64: where in it each step begins and the last one ends


SIZES = 10  # at most, to which batches are filled for CUDA graphs; each size takes a graph


class TextLoader(Loader):
    """Batches of texts, packed without padding (see utils/packed.py).

    In training the random order of an epoch is cut into buckets, and each bucket is sorted by
    length. The result is cut into optimizer steps; the steps are shuffled, and the texts within
    each. So the texts of a step are about equally long, and in every epoch other texts share a
    step. Evaluation goes from the longest text to the shortest: if memory runs out, it does so at
    the start.

    For CUDA graphs each whole batch is filled up to the next of a few sizes (see utils/packed.py).

    Args:
        tokens: (all,) of any integer type, in memory or mapped from a file.
        offsets: (samples + 1,) int64, where each text begins in `tokens`; none is empty.
        labels: (samples,) int64.
        batch_size: samples in a micro-batch.
        device: where the batches are needed.
        ranks: how many processes share every optimizer step.
        accumulation: micro-batches of each rank in an optimizer step.
        step_size: instead: samples in an optimizer step.
        max_len: the most tokens that are kept of a text, from its beginning.
        bucket_batches: about how many optimizer steps make up a bucket: with more of them the texts
            of a step are more alike in length and less random. A small set has smaller buckets, of
            ten steps at least, so that there are four of them.
        rows: (n,) int64, the samples that are used; None: all.
        options: `shuffle`, `seed`, `mixing`, `rank`, `hold_out`, `by_class`: see Loader and Steps.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        labels: np.ndarray,
        *,
        batch_size: int,
        device: torch.device,
        max_len: int,
        ranks: int = 1,
        accumulation: int = 1,
        step_size: int | None = None,
        bucket_batches: int = 50,
        rows: np.ndarray | None = None,
        **options,
    ):
        starts = offsets[:-1]
        if rows is not None:
            starts, labels = starts[rows], labels[rows]
        lengths = text_lengths(offsets, max_len, rows)
        if len(starts) != len(labels):
            raise ValueError(f"{len(labels)} labels, but {len(starts)} texts")
        if lengths.min(initial=1) < 1:
            raise ValueError("a text without tokens: each must have one at least")
        self.tokens, self.max_len = tokens.view(np.ndarray), max_len
        self.starts, self.lengths = np.ascontiguousarray(starts), lengths
        self.bucket_batches = bucket_batches
        self._latest: EpochSteps | None = None
        super().__init__(
            labels,
            batch_size=batch_size,
            step_size=step_size or batch_size * accumulation * ranks,
            device=device,
            ranks=ranks,
            least=1,
            **options,
        )

    def order(self, epoch: int) -> np.ndarray:
        """(samples,) int64: the samples of an epoch in the order in which they are visited.
        `result[loader.order(0)] = predicted` puts predictions back into the order of the texts."""
        return self._steps(epoch).order

    def padding(self, epoch: int = 0) -> float:
        """The fraction of padding, 0 to 1, that an epoch's micro-batches would have if padded."""
        lengths, pieces = self.lengths[self.order(epoch)], list(self.pieces(epoch, 0))
        longest = np.maximum.reduceat(lengths, [piece.place.start for piece in pieces])
        padded = longest @ [piece.place.stop - piece.place.start for piece in pieces]
        return 1 - lengths.sum() / padded

    def _steps(self, epoch: int) -> EpochSteps:
        """The steps of an epoch; computed once, as the loader asks several times."""
        epoch = epoch if self.shuffle else 0
        if self._latest is None or self._latest.epoch != epoch:
            self._latest = self._compute_steps(epoch)
        return self._latest

    def _compute_steps(self, epoch: int) -> EpochSteps:
        if not self.shuffle:
            return EpochSteps(epoch, self._by_length, self._borders(self._by_length))
        generator = random_generator(self.seed, ORDER_STREAM, epoch)
        order = self._permutation(epoch, generator)
        # The last step is smaller if the samples do not fill it. Its texts are random: those at the
        # end of a sorted bucket would always be the longest or the shortest.
        rest = self._rest()
        body, whole = len(order) - rest, self.steps_per_epoch - bool(rest)
        order[:body] = self._by_buckets(order[:body], whole)
        borders = self._borders(order)
        sizes = np.diff(borders)
        visited = np.arange(len(sizes))  # visited[i]: the step that comes as number i
        visited[:whole] = generator.permutation(whole)
        keys = generator.random(len(order)), np.repeat(np.argsort(visited), sizes)
        borders = np.append(0, np.cumsum(sizes[visited]))
        return EpochSteps(epoch, order[np.lexsort(keys)], borders)

    def _by_buckets(self, order: np.ndarray, steps: int) -> np.ndarray:
        """Sorts each bucket by length, alternately up and down, so that a step across the border of
        two buckets has texts of similar lengths, too.

        Args:
            steps: into which the order will be cut.
        """
        if not len(order):
            return order
        size = min(self.bucket_batches, max(10, steps // 4))
        buckets = max(1, steps // size)
        firsts = np.arange(buckets) * steps // buckets * len(order) // steps
        bucket = np.repeat(np.arange(buckets), np.diff(firsts, append=len(order)))
        signed = np.where(bucket % 2, -1, 1) * self.lengths[order]
        return order[np.lexsort((signed, bucket))]

    def pieces(self, epoch: int, start_step: int):
        borders = self._steps(epoch).borders[start_step:].tolist()
        for first, end in pairwise(borders):
            yield from self.pieces_of_step(first, end - first, self._micro_size(end - first))

    def resize(self, batch_size: int, step_size: int) -> None:
        super().resize(batch_size, step_size)
        self._latest = None

    def _heaviest(self, n: int) -> np.ndarray:
        return self._by_length[np.arange(n) % len(self.labels)]

    @functools.cached_property
    def _by_length(self) -> np.ndarray:
        """(samples,) int64: all samples, the longest first."""
        return np.argsort(-self.lengths, kind="stable")

    def _inputs(self, epoch: int, order: np.ndarray, pieces: list[Piece]):
        def inputs_at(place, fills=False) -> PackedTokens:
            samples = order[place]
            starts, lengths = self.starts[samples], self.lengths[samples]
            if fills and self._suits_graphs and len(samples) == self.usual_batch:
                return self._filled(starts, lengths)
            return pack(self.tokens, starts, lengths, self.device)

        return (inputs_at(piece.place, fills=True) for piece in pieces), inputs_at

    @functools.cached_property
    def _filled_sizes(self) -> tuple[int, list[tuple[int, int]]]:
        """(fillers of each filled batch, (tokens, longest) of each size); chosen for the first
        epoch."""
        order, n = self.order(0), self.usual_batch
        lengths = self.lengths[order[: len(order) // n * n]].reshape(-1, n)
        tokens, longest = lengths.sum(1), lengths.max(1)
        sizes = few_sizes(tokens, SIZES)
        longests = np.zeros_like(sizes)
        np.maximum.at(longests, np.searchsorted(sizes, tokens), longest)
        # A filler has a token at least, and as many as the smallest batch of a size needs.
        fillers = max(1, n // 4)
        needed = 1 - -np.diff(sizes, prepend=tokens.min()) // fillers
        longests = np.maximum(longests, needed).clip(max=self.max_len)
        return fillers, list(zip((sizes + fillers).tolist(), longests.tolist(), strict=True))

    def _filled(self, starts: np.ndarray, lengths: np.ndarray) -> PackedTokens:
        """These texts, with fillers if one of the sizes fits."""
        n, sizes = self._filled_sizes
        for size, longest in sizes:
            room = size - int(lengths.sum())
            if lengths.max() <= longest and n <= room <= n * longest:
                # What is in the fillers does not matter: the first tokens that there are.
                starts = np.append(starts, np.zeros(n, np.int64))
                lengths = np.append(lengths, np.diff(room * np.arange(n + 1) // n))
                texts = pack(self.tokens, starts, lengths, self.device, longest)
                return texts._replace(borders=None, fillers=n)
        return pack(self.tokens, starts, lengths, self.device)

    # ---- how an epoch is cut: here by samples, in EqualTokensLoader by tokens -------------------

    def _rest(self) -> int:
        """Samples of the last training step, if it is smaller than the others; else 0."""
        return self.samples % self.step_size

    def _borders(self, order: np.ndarray) -> np.ndarray:
        """(steps + 1,) int64: where each step begins in the order, and where the last one ends."""
        whole = np.arange(0, len(order) + 1, self.step_size)
        return whole if whole[-1] == len(order) else np.append(whole, len(order))

    def _micro_size(self, n: int) -> int:
        """Samples of a micro-batch in a step of n."""
        return self.batch_size


def few_sizes(needed: np.ndarray, most: int) -> np.ndarray:
    """(at most `most`,), ascending: some of `needed`, to the next of which the others are rounded
    up. The first one is the largest, and each further one is that which then saves the most."""
    needed = np.sort(needed)
    sizes = needed[-1:]
    for _ in range(most - 1):
        level = np.searchsorted(sizes, needed)
        below = np.searchsorted(needed, np.append(0, sizes)[level], "right")
        saved = (np.searchsorted(needed, needed, "right") - below) * (sizes[level] - needed)
        sizes = np.union1d(sizes, needed[saved.argmax()])
    return sizes


def text_lengths(offsets: np.ndarray, max_len: int, rows: np.ndarray | None) -> np.ndarray:
    """(n,), how many tokens are kept of each text; see TextLoader."""
    lengths = np.minimum(np.diff(offsets), max_len)
    return lengths if rows is None else lengths[rows]
