"""Optimizer steps of about equally many tokens (`--batch_tokens`), not of equally many texts."""

import numpy as np

from ...errors import UserError
from ..class_sampler import ClassSampler
from ..steps import micro_batch_sizes
from .loader import TextLoader, text_lengths


class EqualTokensLoader(TextLoader):
    """A TextLoader all of whose steps have about equally many tokens, and so take equally long.

    Its micro-batches have about `batch_tokens` tokens; their samples are a multiple of the block
    of `mixing`. `step_size` is the mean over the steps.

    Args:
        batch_tokens: about how many tokens a micro-batch has.
        accumulation: micro-batches of each rank in an optimizer step.
        micro_batches: instead of `accumulation`: micro-batches of all ranks in an optimizer step.
        options: see TextLoader; `batch_size` has no effect.

    Raises:
        UserError: `batch_tokens` is less than a text has on average.
    """

    batch_flag = "--batch_tokens"

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        labels: np.ndarray,
        *,
        batch_tokens: int,
        max_len: int,
        ranks: int = 1,
        accumulation: int = 1,
        micro_batches: int | None = None,
        rows: np.ndarray | None = None,
        **options,
    ):
        self.batch_tokens = batch_tokens
        self.micro_batches = micro_batches or accumulation * ranks
        # As set by the user, before `cut`.
        self._given_tokens, self._given_micro_batches = batch_tokens, self.micro_batches
        lengths = text_lengths(offsets, max_len, rows)
        self.class_sampler = None
        if options.get("by_class"):
            self.class_sampler = ClassSampler(labels if rows is None else labels[rows])
        self.token_steps = self._count_steps(lengths)
        super().__init__(
            tokens,
            offsets,
            labels,
            max_len=max_len,
            ranks=ranks,
            step_size=round(len(lengths) / self.token_steps),
            rows=rows,
            **options,
        )

    def _count_steps(self, lengths: np.ndarray) -> int:
        """Steps of an epoch."""
        total = int(lengths.sum())
        if self.class_sampler is not None:  # on average
            total = round(self.class_sampler.mean(lengths) * len(lengths))
        steps = -(-total // (self.batch_tokens * self.micro_batches))
        if steps > len(lengths):
            raise UserError(
                f"--batch_tokens {self.batch_tokens} is less than a text has, "
                f"{total / len(lengths):.0f} on average: set a larger number"
            )
        return steps

    @property
    def samples(self) -> int:
        return self.total

    @property
    def steps_per_epoch(self) -> int:
        return self.token_steps

    def _rest(self) -> int:
        return 0

    def _borders(self, order: np.ndarray) -> np.ndarray:
        return even_borders(self.lengths[order], self.token_steps)

    def _micro_size(self, n: int) -> int:
        block = getattr(self.mixing, "block", 1)
        return -(-n // (self.micro_batches * block)) * block

    # ---- the same steps in other micro-batches, for --auto_batch --------------------------------

    @property
    def micro_batch(self) -> int:
        """Tokens in a micro-batch."""
        return self.batch_tokens

    @property
    def rank_batch(self) -> int:
        """Tokens of an optimizer step that each rank has."""
        return self._given_tokens * self._given_micro_batches // self.ranks

    def cuts(self) -> list[int]:
        return micro_batch_sizes(self.rank_batch)

    def cut(self, size: int) -> None:
        """Cuts the steps into micro-batches of about `size` tokens. Where they hold fewer samples
        than the block in which samples are mixed, it becomes smaller."""
        self.batch_tokens, self.micro_batches = size, -(-self.rank_batch // size) * self.ranks
        self.token_steps = self._count_steps(self.lengths)
        self.step_size, self._latest = round(len(self.lengths) / self.token_steps), None
        if self.mixing is not None:
            texts = self.block if size >= self._given_tokens else size // int(self.lengths.max())
            divisors = [n for n in range(2, self.block + 1) if self.block % n == 0]
            block = max([n for n in divisors if n <= texts] or divisors[:1] or [1])
            self.mixing = self.mixing.with_block(block)

    def largest(self) -> int:
        ends = np.append(0, np.cumsum(self.lengths[self.order(0)]))
        places = [piece.place for piece in self.pieces(0, 0) if not piece.filler]
        most = max(ends[place.stop] - ends[place.start] for place in places)
        return int(np.searchsorted(np.cumsum(self.lengths[self._by_length]), most)) + 1


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
