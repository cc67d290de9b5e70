#!/usr/bin/env python3
"""Texts in bf16 on a CPU: rows rounded up to few numbers, against as many rows as tokens.

    python benchmarks/text_rows.py

oneDNN compiles a matrix product anew for each number of rows. Both train the same Transformer over
the same packed batches of 64 texts, each in a process of its own; they take turns, from the first
step on. GB are the peak of resident memory beyond what there was before the first step.
"""

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
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import CPU, lengths_like_news, texts
from utils.data.texts.loader import TextLoader
from utils.entry import environment_of_entries
from utils.machine.host_memory import keep_freed_memory
from utils.models import transformer
from utils.optim.factory import build_optimizer
from utils.training.objective import Precision

BATCH, VOCABULARY, MAX_LEN = 64, 20_000, 256
LAYERS, WIDTH = 4, 256
STEPS = 20  # of a turn


class Training:
    """Steps of the Transformer, with rounded rows or without."""

    def __init__(self, rounded: bool, threads: int):
        keep_freed_memory()  # as the entry scripts do
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        if not rounded:
            transformer.rows_for = lambda tokens, device: tokens
        self.model = transformer.Transformer(
            VOCABULARY, 4, LAYERS, WIDTH, WIDTH // 64, 2 * WIDTH, MAX_LEN, attention_dropout=0.0
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

    def turn(self) -> float:
        """Texts per second."""
        started = time.perf_counter()
        for batch in itertools.islice(self.batches, STEPS):
            self.optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast():
                logits = self.model(batch.inputs)
            F.cross_entropy(logits.float(), batch.targets).backward()
            self.optimizer.step()
        return BATCH * STEPS / (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__).parse_args()
    own = environment_of_entries()
    children = {
        name: Child(partial(Training, rounded, options.threads), own)
        for name, rounded in (("rounded", True), ("as many as tokens", False))
    }
    runs = {name: partial(child.call, "turn") for name, child in children.items()}
    speeds = side_by_side(runs, options.repetitions, warm_up=False)
    gb = {name: child.peak_rss() / 1e9 for name, child in children.items()}
    print(", ".join(f"{name}: {value:.2f} GB" for name, value in gb.items()))
    for child in children.values():
        child.close()
    case = f"{LAYERS} layers of {WIDTH}, bf16, the first {options.repetitions * STEPS} steps"
    found = {"samples_per_second": speeds, "gb": gb, "ratios": ratios(speeds, tuple(speeds))}
    report("Rows of packed texts", {case: found}, options.json)


if __name__ == "__main__":
    main()
