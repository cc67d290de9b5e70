#!/usr/bin/env python3
"""Training steps on texts without padding, against the usual way: random batches, padded.

    python benchmarks/text_step.py
    python benchmarks/text_step.py --layers 6 --dim 512 --heads 8 --ffn 1024 --repetitions 1

Both ways train the same Transformer with fused AdamW over the same texts, loading included.
`packed` is ours: texts of similar lengths meet, and their tokens are computed without padding.
`padded` has random batches that are padded to their longest text, with a key mask in attention.
They take turns. One turn is a few steps of an epoch; of ours, which differ in length, steps from
short to long, evenly spread. Speeds are real tokens per second over the tokens of a mean text. The
losses of the two ways on equal batches are checked to be equal first.

The lengths are some of those in a file, or drawn so that they are much like those of AG News: 45
tokens in the mean, with a long tail.
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
from benchmarks.common import parser, ratio, report, side_by_side
from utils.data.texts.loader import TextLoader
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer
from utils.packed import PackedTokens

CLASSES = 4
CLS = 1
CPU = torch.device("cpu")


def lengths_like_news(n: int, max_len: int, generator: np.random.Generator) -> np.ndarray:
    """(n,) int64: 45 in the mean, with one text in a hundred three times as long or more."""
    body = generator.normal(44, 10, n)
    tail = generator.lognormal(4.0, 0.6, n)
    lengths = np.where(generator.random(n) < 0.05, tail, body)
    return np.clip(lengths, 8, max_len).astype(np.int64)


def texts(lengths: np.ndarray, vocab: int, generator: np.random.Generator) -> tuple:
    """(tokens, offsets, labels); words are as frequent as words are."""
    offsets = np.append(0, np.cumsum(lengths))
    frequency = 1 / np.arange(1, vocab - 1)
    tokens = 2 + generator.choice(vocab - 2, offsets[-1], p=frequency / frequency.sum())
    tokens[offsets[:-1]] = CLS
    return tokens.astype(np.uint16), offsets, generator.integers(0, CLASSES, len(lengths))


def to_padded(texts: PackedTokens) -> Tensor:
    """(n, longest) int64, filled up with 0."""
    grid = torch.zeros(texts.samples * texts.longest, dtype=torch.int64)
    return grid.index_copy_(0, texts.place, texts.ids).view(texts.samples, texts.longest)


class Padded:
    """Random batches, padded to their longest text."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray, batch: int):
        self.tokens, self.offsets, self.labels = tokens.astype(np.int64), offsets, labels
        self.batch, self.lengths = batch, np.diff(offsets)

    def steps(self, turn: int, count: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(ids, targets, real tokens) of `count` batches."""
        order = np.random.default_rng([1, turn]).permutation(len(self.labels))
        for first in range(0, count * self.batch, self.batch):
            samples = order[first : first + self.batch]
            position = np.arange(self.lengths[samples].max())
            inside = position < self.lengths[samples, None]
            grid = np.zeros(inside.shape, np.int64)
            grid[inside] = self.tokens[(self.offsets[samples, None] + position)[inside]]
            targets = torch.from_numpy(self.labels[samples])
            yield torch.from_numpy(grid), targets, int(inside.sum())

    def padding(self) -> float:
        """Share of an epoch, 0 to 1."""
        sizes = [
            (ids.numel(), real) for ids, _, real in self.steps(0, len(self.labels) // self.batch)
        ]
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
    for number, batch in enumerate(loader.epoch(0)):
        if number == batches:
            break
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
    words = parser(__doc__.splitlines()[0])
    words.set_defaults(repetitions=3)
    words.add_argument("--lengths", type=Path, help="a .npy file of the texts' tokens")
    words.add_argument("--texts", type=int, default=32_000, help="how many (default: 32,000)")
    words.add_argument("--steps", type=int, default=5, help="in a turn (default: 5)")
    words.add_argument("--batch", type=int, default=256)
    words.add_argument("--max_len", type=int, default=256)
    words.add_argument("--vocab", type=int, default=30_000)
    words.add_argument("--layers", type=int, default=2)
    words.add_argument("--dim", type=int, default=256)
    words.add_argument("--heads", type=int, default=4)
    words.add_argument("--ffn", type=int, default=512)
    words.add_argument("--dropout", type=float, default=0.1)
    words.add_argument("--attention_dropout", type=float, default=None, help="(default: dropout)")
    options = words.parse_args()
    torch.set_num_threads(options.threads)
    generator = np.random.default_rng(0)
    if options.lengths is not None:
        lengths = np.load(options.lengths).astype(np.int64)
        lengths = lengths[generator.permutation(len(lengths))[: options.texts]]
    else:
        lengths = lengths_like_news(options.texts, options.max_len, generator)
    lengths = lengths.clip(1, options.max_len)
    tokens, offsets, labels = texts(lengths, options.vocab, generator)
    loader = TextLoader(
        tokens, offsets, labels, batch_size=options.batch, device=CPU,
        max_len=options.max_len, shuffle=True,
    )  # fmt: skip
    usual = Padded(tokens, offsets, labels, options.batch)
    torch.manual_seed(0)
    model = Transformer(
        options.vocab, CLASSES, options.layers, options.dim, options.heads, options.ffn,
        options.max_len, options.dropout, options.attention_dropout,
    )  # fmt: skip
    difference = check_same(model, loader, 2)
    assert difference < 1e-5, f"the losses of equal batches differ by {difference}"
    padding = {"packed": loader.padding(), "padded": usual.padding()}
    print(
        f"{len(lengths):,} texts of {lengths.mean():.1f} tokens in the mean; padding: "
        f"{padding['padded']:.1%} of random batches, {padding['packed']:.1%} of ours in attention, "
        f"0 % elsewhere; losses of equal batches differ by {difference:.0e}"
    )
    mean, count = lengths.mean(), options.steps
    runs = {
        "packed": training(model, lambda turn: packed_steps(loader, turn, count), mean),
        "padded": training(model, lambda turn: usual.steps(turn, count), mean),
    }
    figures = side_by_side(runs, options.repetitions)
    case = f"{options.layers} layers of {options.dim}, batch {options.batch}"
    results = {
        case: {
            "samples_per_second": figures,
            "padding": padding,
            "loss_difference": difference,
            "ratios": {"packed / padded": ratio(figures, "packed", "padded")},
        }
    }
    report("Texts: training steps", results, options.json)


if __name__ == "__main__":
    main()
