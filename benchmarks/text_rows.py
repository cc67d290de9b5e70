#!/usr/bin/env python3
"""Texts in bf16 on a CPU: rows rounded up to few numbers, against as many rows as tokens.

    python benchmarks/text_rows.py
    python benchmarks/text_rows.py --layers 6 --dim 512 --steps 10

oneDNN compiles a product anew for another number of rows. Both train the same Transformer over the
same batches of 64 texts, packed, each in a process of its own; they take turns, from the first step
on. GB are the peak of resident memory beyond that before the first step.
"""

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.child import Child
from benchmarks.common import parser, ratio, report
from benchmarks.text_step import lengths_like_news, texts
from utils.data.texts.loader import TextLoader
from utils.entry import environment_of_entries
from utils.machine.host_memory import keep_freed_memory
from utils.models import transformer
from utils.optim.factory import build_optimizer
from utils.training.objective import Precision

CPU = torch.device("cpu")
BATCH, VOCABULARY, MAX_LEN = 64, 20_000, 256


class Steps:
    def __init__(self, rounded: bool, options: argparse.Namespace):
        keep_freed_memory()  # as the entry scripts do
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        if not rounded:
            transformer.rows_for = lambda tokens, device: tokens
        dim, heads = options.dim, options.dim // 64
        self.model = transformer.Transformer(
            VOCABULARY, 4, options.layers, dim, heads, 2 * dim, MAX_LEN, attention_dropout=0.0
        )
        self.optimizer = build_optimizer("adamw", self.model, lr=1e-4, weight_decay=0.01)
        rng = np.random.default_rng(0)
        lengths = lengths_like_news(100 * BATCH, MAX_LEN, rng)
        loader = TextLoader(
            *texts(lengths, VOCABULARY, rng), batch_size=BATCH, device=CPU, max_len=MAX_LEN,
            shuffle=True,
        )  # fmt: skip
        self.batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch, 0))
        self.precision = Precision("bf16", CPU)

    def steps(self, count: int) -> float:
        """Texts per second."""
        started = time.perf_counter()
        for batch in itertools.islice(self.batches, count):
            self.optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast():
                logits = self.model(batch.inputs)
            F.cross_entropy(logits.float(), batch.targets).backward()
            self.optimizer.step()
        return BATCH * count / (time.perf_counter() - started)


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--dim", type=int, default=256, help="a multiple of 64 (default: 256)")
    words.add_argument("--steps", type=int, default=20, help="of a turn (default: 20)")
    options = words.parse_args()
    ways = {"rounded": True, "as many as tokens": False}
    own = environment_of_entries()
    children = {name: Child(partial(Steps, one, options), own) for name, one in ways.items()}
    speeds = {name: [] for name in ways}
    for turn in range(options.repetitions):
        for name in list(ways) if turn % 2 == 0 else reversed(ways):
            speeds[name].append(children[name].call("steps", options.steps))
    gb = {name: child.peak_rss() / 1e9 for name, child in children.items()}
    print(", ".join(f"{name}: {value:.2f} GB" for name, value in gb.items()))
    for child in children.values():
        child.close()
    steps = options.repetitions * options.steps
    case = f"{options.layers} layers of {options.dim}, bf16, the first {steps} steps"
    ratios = {"rounded / as many as tokens": ratio(speeds, *ways)}
    report(
        "Rows of packed texts",
        {case: {"samples_per_second": speeds, "gb": gb, "ratios": ratios}},
        options.json,
    )


if __name__ == "__main__":
    main()
