#!/usr/bin/env python3
"""Training steps on texts without padding, against the usual way: random batches, padded.

    python benchmarks/text_step.py

Both ways train the same Transformer with fused AdamW over the same texts, loading included, in
turn. `packed` is ours: texts of similar lengths share a batch, and their tokens are computed
without padding. `padded` has random batches padded to their longest text, with a key mask in
attention. A turn is a few steps of an epoch; the packed steps, which differ in length, are spread
evenly from short to long. Speeds are real tokens per second, divided by the tokens of a mean text.
First it is checked that both give the same losses on equal batches.

The lengths are drawn to resemble those of AG News: 45 tokens on average, with a long tail.
"""

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import CPU, TOPICS, lengths_like_news, texts
from utils.data.texts.loader import TextLoader
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer
from utils.packed import PackedTokens

TEXTS, BATCH, VOCABULARY, MAX_LEN = 32_000, 256, 30_000, 256
LAYERS, WIDTH = 2, 256


def to_padded(texts: PackedTokens) -> Tensor:
    """(n, longest) int64, padded with 0."""
    grid = torch.zeros(texts.samples * texts.longest, dtype=torch.int64)
    return grid.index_copy_(0, texts.place, texts.ids).view(texts.samples, texts.longest)


class Padded:
    """Random batches, padded to their longest text."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray):
        self.tokens, self.offsets, self.labels = tokens.astype(np.int64), offsets, labels
        self.lengths = np.diff(offsets)

    def steps(self, turn: int, count: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(ids, targets, real tokens) of `count` batches."""
        order = np.random.default_rng([1, turn]).permutation(len(self.labels))
        for first in range(0, count * BATCH, BATCH):
            samples = order[first : first + BATCH]
            position = np.arange(self.lengths[samples].max())
            inside = position < self.lengths[samples, None]
            grid = np.zeros(inside.shape, np.int64)
            grid[inside] = self.tokens[(self.offsets[samples, None] + position)[inside]]
            targets = torch.from_numpy(self.labels[samples])
            yield torch.from_numpy(grid), targets, int(inside.sum())

    def padding(self) -> float:
        """Of the positions of an epoch, 0 to 1."""
        sizes = [(ids.numel(), real) for ids, _, real in self.steps(0, len(self.labels) // BATCH)]
        return 1 - sum(real for _, real in sizes) / sum(size for size, _ in sizes)


def packed_steps(
    loader: TextLoader, turn: int, count: int
) -> Iterator[tuple[PackedTokens, Tensor, int]]:
    """(texts, targets, tokens) of `count` steps of an epoch, from few tokens to many."""
    order = loader.order(turn)
    whole = len(order) // loader.step_size
    tokens = loader.lengths[order[: whole * loader.step_size]].reshape(whole, -1).sum(1)
    quantile = (np.arange(count) + np.random.default_rng([2, turn]).random()) / count
    for step in np.argsort(tokens)[(quantile * whole).astype(np.int64)]:
        batch = next(iter(loader.epoch(turn, int(step))))
        yield batch.inputs, batch.targets, len(batch.inputs.ids)


def check_same(model: Transformer, loader: TextLoader, batches: int) -> float:
    """Largest relative difference of the losses of equal batches, packed and padded."""
    model = copy.deepcopy(model).eval()
    differences = []
    for batch in itertools.islice(loader.epoch(0), batches):
        with torch.no_grad():
            ours = F.cross_entropy(model(batch.inputs), batch.targets)
            theirs = F.cross_entropy(model(to_padded(batch.inputs)), batch.targets)
        differences.append(abs(ours - theirs).item() / theirs.item())
    return max(differences)


def training(model: Transformer, steps: Callable[[int], Iterator], mean: float) -> Callable:
    """() -> samples of `mean` tokens per second over a turn."""
    model = copy.deepcopy(model).train()
    optimizer = build_optimizer("adamw", model, lr=1e-4, weight_decay=0.01)
    turn = itertools.count()

    def run() -> float:
        tokens, started = 0, time.perf_counter()
        for inputs, targets, real in steps(next(turn)):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += real
        return tokens / mean / (time.perf_counter() - started)

    return run


def main() -> None:
    flags = parser(__doc__, repetitions=3)
    flags.add_argument("--steps", type=int, default=5, help="in a turn (default: 5)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    generator = np.random.default_rng(0)
    lengths = lengths_like_news(TEXTS, MAX_LEN, generator)
    data, mean = texts(lengths, VOCABULARY, generator), lengths.mean()
    loader = TextLoader(*data, batch_size=BATCH, device=CPU, max_len=MAX_LEN, shuffle=True)
    usual = Padded(*data)
    torch.manual_seed(0)
    model = Transformer(
        VOCABULARY, TOPICS, LAYERS, WIDTH, WIDTH // 64, 2 * WIDTH, MAX_LEN, dropout=0.1
    )
    difference = check_same(model, loader, 2)
    assert difference < 1e-5, f"the losses of equal batches differ by {difference}"
    padding = {"packed": loader.padding(), "padded": usual.padding()}
    print(
        f"{TEXTS:,} texts of {mean:.1f} tokens on average; padding: {padding['padded']:.1%} of "
        f"random batches, {padding['packed']:.1%} of ours in attention, 0 % elsewhere; losses of "
        f"equal batches differ by {difference:.0e}"
    )
    runs = {
        "packed": training(model, lambda turn: packed_steps(loader, turn, options.steps), mean),
        "padded": training(model, lambda turn: usual.steps(turn, options.steps), mean),
    }
    figures = side_by_side(runs, options.repetitions)
    found = {"samples_per_second": figures, "padding": padding, "ratios": ratios(figures, (*runs,))}
    case = f"{LAYERS} layers of {WIDTH}, batch {BATCH}"
    report("Texts: training steps", {case: found}, options.json)


if __name__ == "__main__":
    main()
