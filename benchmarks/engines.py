#!/usr/bin/env python3
"""Training steps of PyTorch, of torch.compile and of ONNX Runtime: time and memory, on a CPU.

    python benchmarks/engines.py
    python benchmarks/engines.py --case vit --repetitions 5

For ONNX Runtime it needs the environment of requirements-ort.txt; elsewhere the others are timed
alone. Forward and backward passes and steps of SGD over one batch, in float32, in a process for
each engine. All of a case are kept, and take their turns of a few steps one after the other.
`first step` includes compiling, or exporting the graph and comparing its gradients with PyTorch's.
Gigabytes are the process's peak beyond what it had before the first step; what the first step takes
for a while counts, too.
"""

import contextlib
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.child import Child
from benchmarks.common import parser, ratios, report, side_by_side
from utils.engines.ort.module import OrtModule
from utils.engines.ort.session import why_missing
from utils.machine.host_memory import keep_freed_memory
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.models.vit import ViT
from utils.packed import pack

EAGER, COMPILE, ORT = "eager", "torch.compile", "ONNX Runtime"
CPU = torch.device("cpu")
CLASSES, VOCABULARY, SIDE = 10, 30_000, 32


class Case(NamedTuple):
    name: str
    batch: int


CASES = {
    "resnet18": Case("ResNet-18", 32),
    "resnet50": Case("ResNet-50", 16),
    "transformer": Case("Transformer of 4 layers of 256", 64),
    "vit": Case("ViT of 9 layers of 192", 32),
}


def build(case: str) -> tuple[nn.Module, object]:
    """The model, and a batch for it."""
    batch = CASES[case].batch
    if case == "transformer":
        lengths = np.random.default_rng(0).integers(20, 69, batch)
        tokens = np.random.default_rng(1).integers(1, VOCABULARY, lengths.sum())
        starts = np.cumsum(lengths) - lengths
        model = Transformer(VOCABULARY, CLASSES, 4, 256, 4, 512, 256, dropout=0.1)
        return model, pack(tokens, starts, lengths, CPU)
    pictures = torch.randn(batch, 3, SIDE, SIDE).to(memory_format=torch.channels_last)
    if case == "vit":
        return ViT(CLASSES), pictures
    model = ResNet(int(case.removeprefix("resnet")), CLASSES)
    return model.to(memory_format=torch.channels_last), pictures


class Steps:
    """Training steps of a case by an engine."""

    def __init__(self, case: str, engine: str, threads: int):
        torch.set_num_threads(threads)
        keep_freed_memory()
        torch.manual_seed(0)
        self.model, self.inputs = build(case)
        self.called = self.model.train()
        if engine == COMPILE:
            self.called = torch.compile(self.model)
        if engine == ORT:
            self.called = OrtModule(self.model, lambda line: None)
        self.targets = torch.arange(CASES[case].batch) % CLASSES
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9, fused=True)

    def take(self, steps: int) -> float:
        """Seconds of a step, on average."""
        started = time.perf_counter()
        for _ in range(steps):
            F.cross_entropy(self.called(self.inputs), self.targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - started) / steps


def measure(case: str, engines: list[str], options) -> dict:
    """Speeds, first steps, gigabytes and ratios of a case."""
    with contextlib.ExitStack() as stack:
        children, first = {}, {}
        for engine in engines:
            child = Child(partial(Steps, case, engine, options.threads))
            children[engine] = stack.enter_context(contextlib.closing(child))
            first[engine] = child.call("take", 1)
        batch = CASES[case].batch

        def speed(engine: str) -> float:
            return batch / children[engine].call("take", options.steps)

        runs = {engine: partial(speed, engine) for engine in engines}
        speeds = side_by_side(runs, options.repetitions)
        gigabytes = {engine: child.peak_rss() / 1e9 for engine, child in children.items()}
    for engine in engines:
        print(
            f"{CASES[case].name}, {engine}: first step {first[engine]:.1f} s, "
            f"{gigabytes[engine]:.2f} GB, {statistics.median(speeds[engine]):.1f} samples/s",
            flush=True,
        )
    pairs = [(engine, EAGER) for engine in engines if engine != EAGER]
    return {
        "samples_per_second": speeds,
        "first_step_seconds": first,
        "gb": gigabytes,
        "ratios": ratios(speeds, *pairs),
    }


def main() -> None:
    flags = parser(__doc__, repetitions=5)
    flags.add_argument("--case", choices=CASES, help="(default: all)")
    flags.add_argument("--steps", type=int, default=1, help="in a turn (default: 1)")
    options = flags.parse_args()
    engines = [EAGER, COMPILE, ORT]
    if (reason := why_missing()) is not None:
        engines.remove(ORT)
        print(f"without ONNX Runtime: {reason}")
    cases = [options.case] if options.case else list(CASES)
    results = {
        f"{CASES[case].name}, batch {CASES[case].batch}": measure(case, engines, options)
        for case in cases
    }
    report("Engines", results, options.json)


if __name__ == "__main__":
    main()
