"""Batches of texts of similar lengths, so that hardly anything is computed for padding."""

import functools
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...errors import UserError
from ...packed import PackedTokens, pack
from ..batch import ORDER_STREAM, random_generator
from ..loader import Loader
from ..steps import Piece, micro_batch_sizes


class EpochSteps(NamedTuple):
    """The optimizer steps of an epoch."""

    epoch: int
    order: np.ndarray  # (samples,) int64: the samples, as they are visited
    borders: np.ndarray  # (steps + 1,) int64: where in it each step begins and the last one ends


class TextLoader(Loader):
    """Batches of texts, packed without padding (see utils/packed.py).

    In training the random order of an epoch is cut into buckets, and each bucket is sorted by
    length. The result is cut into optimizer steps; the steps are shuffled, and the texts within
    each. So the texts of a step are about equally long, and in every epoch other texts share a
    step. Evaluation goes from the longest text to the shortest: if memory runs out, it does so at
    the start.

    Args:
        tokens: (all,) of any integer type, in memory or mapped from a file.
        offsets: (samples + 1,) int64, where each text begins in `tokens`; none is empty.
        labels: (samples,) int64.
        batch_size: samples in a micro-batch.
        device: where the batches are needed.
        ranks: how many processes share every optimizer step.
        accumulation: micro-batches of each rank in an optimizer step.
        micro_batches: instead of `accumulation`: micro-batches of all ranks in an optimizer step.
        step_size: instead of both: samples in an optimizer step; not used with `batch_tokens`.
        max_len: the most tokens that are kept of a text, from its beginning.
        batch_tokens: about how many tokens a micro-batch has, instead of `batch_size` samples; all
            steps of an epoch then have about equally many. The samples of a micro-batch are
            then a multiple of the block of `mixing`. None: batches of `batch_size`.
        bucket_batches: about how many optimizer steps make up a bucket: with more of them the texts
            of a step are more alike in length and less random. A small set has smaller buckets, of
            ten steps at least, so that there are four of them.
        rows: (n,) int64, the samples that are used; None: all.
        options: `shuffle`, `seed`, `mixing`, `rank`, `hold_out`: see Loader and Steps.
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
        micro_batches: int | None = None,
        batch_tokens: int | None = None,
        bucket_batches: int = 50,
        rows: np.ndarray | None = None,
        **options,
    ):
        starts, lengths = offsets[:-1], np.diff(offsets)
        if rows is not None:
            starts, lengths, labels = starts[rows], lengths[rows], labels[rows]
        if len(starts) != len(labels):
            raise ValueError(f"{len(labels)} labels, but {len(starts)} texts")
        if lengths.min(initial=1) < 1:
            raise ValueError("a text without tokens: each must have one at least")
        self.tokens, self.max_len = tokens.view(np.ndarray), max_len
        self.starts, self.lengths = np.ascontiguousarray(starts), np.minimum(lengths, max_len)
        self.bucket_batches, self.batch_tokens = bucket_batches, batch_tokens
        self.micro_batches = micro_batches or accumulation * ranks
        # As set by the user, before `cut`.
        self._given_tokens, self._given_micro_batches = batch_tokens, self.micro_batches
        self.token_steps, step_size = None, step_size or batch_size * self.micro_batches
        if batch_tokens is not None:
            self.token_steps = self._count_steps(batch_tokens)
            step_size = round(len(labels) / self.token_steps)  # the mean, for reporting speeds
        self._latest: EpochSteps | None = None
        super().__init__(
            labels,
            batch_size=batch_size,
            step_size=step_size,
            device=device,
            ranks=ranks,
            least=1,
            **options,
        )

    def _count_steps(self, batch_tokens: int) -> int:
        total = int(self.lengths.sum())
        steps = -(-total // (batch_tokens * self.micro_batches))
        if steps > len(self.lengths):
            raise UserError(
                f"--batch_tokens {batch_tokens} is less than a text has, "
                f"{total / len(self.lengths):.0f} on average: set a larger number"
            )
        return steps

    @property
    def samples(self) -> int:
        return super().samples if self.token_steps is None else self.total

    @property
    def steps_per_epoch(self) -> int:
        return super().steps_per_epoch if self.token_steps is None else self.token_steps

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
            return EpochSteps(epoch, self._by_length, self._borders(self._by_length, 0))
        generator = random_generator(self.seed, ORDER_STREAM, epoch)
        order = self._permutation(epoch, generator)
        # The last step is smaller if the samples do not fill it. Its texts are random: those at the
        # end of a sorted bucket would always be the longest or the shortest.
        rest = 0 if self.token_steps is not None else self.samples % self.step_size
        body = len(order) - rest
        order[:body] = self._by_buckets(order[:body])
        borders = self._borders(order, rest)
        sizes = np.diff(borders)
        visited = np.arange(len(sizes))  # visited[i]: the step that comes as number i
        whole = len(sizes) - bool(rest)
        visited[:whole] = generator.permutation(whole)
        keys = generator.random(len(order)), np.repeat(np.argsort(visited), sizes)
        borders = np.append(0, np.cumsum(sizes[visited]))
        return EpochSteps(epoch, order[np.lexsort(keys)], borders)

    def _by_buckets(self, order: np.ndarray) -> np.ndarray:
        """The order with each bucket sorted by length, alternately up and down, so that a step
        across the border of two buckets has texts of similar lengths, too."""
        if not len(order):
            return order
        steps = self.token_steps or len(order) // self.step_size
        size = min(self.bucket_batches, max(10, steps // 4))
        buckets = max(1, steps // size)
        firsts = np.arange(buckets) * steps // buckets * len(order) // steps
        bucket = np.repeat(np.arange(buckets), np.diff(firsts, append=len(order)))
        signed = np.where(bucket % 2, -1, 1) * self.lengths[order]
        return order[np.lexsort((signed, bucket))]

    def _borders(self, order: np.ndarray, rest: int) -> np.ndarray:
        """(steps + 1,) int64: where each step begins in the order, and where the last one ends."""
        if self.token_steps is None:
            whole = np.arange(0, len(order) - rest + 1, self.step_size)
            return whole if whole[-1] == len(order) else np.append(whole, len(order))
        return even_borders(self.lengths[order], self.token_steps)

    def pieces(self, epoch: int, start_step: int):
        borders = self._steps(epoch).borders[start_step:].tolist()
        for first, end in pairwise(borders):
            yield from self.pieces_of_step(first, end - first, self._micro_size(end - first))

    def _micro_size(self, n: int) -> int:
        """Samples of a micro-batch in a step of n; with `batch_tokens` a multiple of the block."""
        if self.token_steps is None:
            return self.batch_size
        block = getattr(self.mixing, "block", 1)
        return -(-n // (self.micro_batches * block)) * block

    # ---- the same steps in other micro-batches, whose size is in tokens with `batch_tokens` ------

    @property
    def batch_flag(self) -> str:  # type: ignore[override]  # only read
        return "--batch_size" if self.token_steps is None else "--batch_tokens"

    @property
    def micro_batch(self) -> int:
        return self.batch_size if self.token_steps is None else self.batch_tokens

    @property
    def rank_batch(self) -> int:
        if self._given_tokens is None:
            return super().rank_batch
        return self._given_tokens * self._given_micro_batches // self.ranks

    def cuts(self) -> list[int]:
        return super().cuts() if self.token_steps is None else micro_batch_sizes(self.rank_batch)

    def cut(self, size: int) -> None:
        if self.token_steps is None:
            super().cut(size)
            return
        self.batch_tokens, self.micro_batches = size, -(-self.rank_batch // size) * self.ranks
        self.token_steps = self._count_steps(size)
        self.step_size, self._latest = round(len(self.labels) / self.token_steps), None
        if self.mixing is not None:
            texts = self.block if size >= self._given_tokens else size // int(self.lengths.max())
            divisors = [n for n in range(2, self.block + 1) if self.block % n == 0]
            block = max([n for n in divisors if n <= texts] or divisors[:1] or [1])
            self.mixing = self.mixing.with_block(block)

    def resize(self, batch_size: int, step_size: int) -> None:
        super().resize(batch_size, step_size)
        self._latest = None

    def largest(self) -> int:
        if self.token_steps is None:
            return super().largest()
        ends = np.append(0, np.cumsum(self.lengths[self.order(0)]))
        places = [piece.place for piece in self.pieces(0, 0) if not piece.filler]
        most = max(ends[place.stop] - ends[place.start] for place in places)
        return int(np.searchsorted(np.cumsum(self.lengths[self._by_length]), most)) + 1

    def _heaviest(self, n: int) -> np.ndarray:
        return self._by_length[np.arange(n) % len(self.labels)]

    @functools.cached_property
    def _by_length(self) -> np.ndarray:
        """(samples,) int64: all samples, the longest first."""
        return np.argsort(-self.lengths, kind="stable")

    def _inputs(self, epoch: int, order: np.ndarray, pieces: list[Piece]):
        def inputs_at(place) -> PackedTokens:
            samples = order[place]
            return pack(self.tokens, self.starts[samples], self.lengths[samples], self.device)

        return (inputs_at(piece.place) for piece in pieces), inputs_at


def even_borders(lengths: np.ndarray, steps: int) -> np.ndarray:
    """Cuts texts, in their order, into steps of about equally many tokens.

    Args:
        lengths: (n,), tokens of each text.
        steps: 1 to n.
    Returns:
        (steps + 1,) int64, from 0 to n; each step has one text at least, or two if n allows it.
    """
    n, least = len(lengths), 2 if 2 * steps <= len(lengths) else 1
    ends = np.cumsum(lengths)
    wanted = ends[-1] / steps * np.arange(steps + 1)
    # A text belongs to the step in which its middle lies.
    borders = np.searchsorted(ends - lengths / 2, wanted)
    room = least * np.arange(steps + 1)
    borders = np.maximum.accumulate(borders - room) + room
    return np.minimum(borders, n - least * steps + room)
