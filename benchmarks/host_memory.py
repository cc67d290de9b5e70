#!/usr/bin/env python3
"""Time and memory of a training step by what the C library does with freed memory, on a CPU.

    python benchmarks/host_memory.py
    python benchmarks/host_memory.py --case resnet18 --repetitions 5

Forward and backward passes over random inputs, in a process for each setting of glibc's malloc and
each mode of --fused, in turn. Gigabytes are the process's peak beyond what it had before the first
step: after two steps, and after all.

    default       freed tensors of 32 MB and more go back to the system, and so does the heap's end;
                  they are mapped anew, page by page
    kept          nothing goes back: what the toolkit's entry scripts do on a CPU
    kept, large   the same, in pages of 2 MB
    given back    all of 2 MB and more goes back
"""

import contextlib
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.child import Child
from benchmarks.common import in_turn, parser, ratio, ratios, report
from utils.fused import fuse
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.training.objective import Precision

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SETTINGS = {
    "default": {},
    "kept": KEPT,
    "kept, large": KEPT | {"THP_MEM_ALLOC_ENABLE": "1"},
    "given back": {"MALLOC_MMAP_THRESHOLD_": str(2 << 20), "MALLOC_MMAP_MAX_": str(1 << 30)},
}
WARM_UP = 2  # steps


class Case(NamedTuple):
    """A ResNet with CIFAR stem of this depth, or where that is 0 a Transformer.

    Attributes:
        settings, modes: of malloc and of --fused, that are measured.
    """

    name: str
    depth: int
    width: int
    precision: str
    batch: int
    settings: tuple[str, ...] = ("default", "kept")
    modes: tuple[str, ...] = ("none",)


CASES = {
    "resnet50": Case("ResNet-50", 50, 64, "bf16", 64, tuple(SETTINGS), ("none", "memory")),
    "resnet18": Case("ResNet-18", 18, 64, "fp32", 64),
    "narrow": Case("ResNet-18 of width 32", 18, 32, "bf16", 128),
    "transformer": Case("Transformer of 4 layers of 256", 0, 256, "bf16", 64),
}


class Passes:
    """Forward and backward passes of a case with a mode of --fused."""

    def __init__(self, case: Case, mode: str, threads: int):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        if case.depth:
            self.model = ResNet(case.depth, 10, case.width).to(memory_format=torch.channels_last)
            inputs = torch.randn(case.batch, 3, 32, 32)
            self.inputs = inputs.to(memory_format=torch.channels_last)
        else:
            heads, ffn = case.width // 64, 2 * case.width
            self.model = Transformer(30_000, 10, 4, case.width, heads, ffn, 256, dropout=0.1)
            self.inputs = torch.randint(1, 30_000, (case.batch, 44))
        fuse(self.model.train(), mode)
        self.targets = torch.arange(case.batch) % 10
        self.precision = Precision(case.precision, torch.device("cpu"))

    def take(self, steps: int) -> list[float]:
        """Seconds of each."""
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        started = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        with self.precision.autocast():
            logits = self.model(self.inputs)
        F.cross_entropy(logits.float(), self.targets).backward()
        return time.perf_counter() - started


def in_a_process(case: Case, mode: str, setting: str, steps: int, threads: int) -> dict:
    """Samples per second after the warm-up, and gigabytes."""
    child = Child(partial(Passes, case, mode, threads), SETTINGS[setting])
    with contextlib.closing(child):
        child.call("take", WARM_UP)
        after_two = child.peak_rss()
        speed = case.batch / statistics.median(child.call("take", steps))
        return {"speed": speed, "after_two": after_two / 1e9, "after_all": child.peak_rss() / 1e9}


def measure(case: Case, options) -> dict:
    kinds = {f"{mode}, {one}": (mode, one) for mode in case.modes for one in case.settings}
    turns = {name: [] for name in kinds}
    for name in in_turn(kinds, options.repetitions):
        turn = in_a_process(case, *kinds[name], options.steps, options.threads)
        turns[name].append(turn)
    speeds = {name: [turn["speed"] for turn in found] for name, found in turns.items()}
    gigabytes = {name: [turn["after_all"] for turn in found] for name, found in turns.items()}
    for name, found in turns.items():
        two = max(turn["after_two"] for turn in found)
        print(f"{case.name}, {name}: {two:.2f} GB after {WARM_UP} steps, "
              f"{max(gigabytes[name]):.2f} GB after all", flush=True)  # fmt: skip
    plain, *others = kinds
    compared = ratios(speeds, *((name, plain) for name in others))
    for mode in case.modes[1:]:
        for one in case.settings:
            slower = ratio(speeds, f"none, {one}", f"{mode}, {one}")
            compared[f"step time, {mode} / none, {one}"] = slower
    return {"samples_per_second": speeds, "gb": gigabytes, "ratios": compared}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--case", choices=CASES, help="(default: all)")
    flags.add_argument("--steps", type=int, default=8, help="of each process (default: 8)")
    options = flags.parse_args()
    cases = [CASES[options.case]] if options.case else CASES.values()
    results = {
        f"{case.name}, {case.precision}, batch {case.batch}": measure(case, options)
        for case in cases
    }
    report("Freed memory on a CPU", results, options.json)


if __name__ == "__main__":
    main()
