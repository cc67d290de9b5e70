#!/usr/bin/env python3
"""What the C library does with freed memory on a CPU: the time of a step, and what it takes.

    python benchmarks/host_memory.py
    python benchmarks/host_memory.py --case resnet18 --repetitions 5

A process for each setting of glibc's malloc and each mode of --fused, in turn; it trains on random
inputs, forward and backward passes alone. Gigabytes are what the process has taken at most beyond
what it had before the first step: after two steps, and after all.

    as it is      tensors of 32 MB and more go back to the system when they are freed, smaller ones
                  from the heap's end, and come anew, page by page
    kept          nothing goes back: what the toolkit's entry scripts do on a CPU
    kept, large   the same, in pages of 2 MB
    given back    all of 2 MB and more goes back
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratio, report
from utils.machine.host_memory import peak_rss

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SETTINGS = {
    "as it is": {},
    "kept": KEPT,
    "kept, large": KEPT | {"THP_MEM_ALLOC_ENABLE": "1"},
    "given back": {"MALLOC_MMAP_THRESHOLD_": str(2 << 20), "MALLOC_MMAP_MAX_": str(1 << 30)},
}
USUAL = ("as it is", "kept")
WARM_UP = 2


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
    settings: tuple[str, ...] = USUAL
    modes: tuple[str, ...] = ("none",)


CASES = {
    "resnet50": Case("ResNet-50", 50, 64, "bf16", 64, tuple(SETTINGS), ("none", "memory")),
    "resnet18": Case("ResNet-18", 18, 64, "fp32", 64),
    "narrow": Case("ResNet-18 of width 32", 18, 32, "bf16", 128),
    "transformer": Case("Transformer of 4 layers of 256", 0, 256, "bf16", 64),
}


def train(case: Case, mode: str, steps: int, threads: int) -> dict:
    """In this process: seconds of each step after the warm-up, and gigabytes."""
    import torch
    import torch.nn.functional as F

    from utils.fused import fuse
    from utils.models.resnet import ResNet
    from utils.models.transformer import Transformer
    from utils.training.objective import Precision

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if case.depth:
        model = ResNet(case.depth, 10, case.width).to(memory_format=torch.channels_last)
        inputs = torch.randn(case.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    else:
        heads, ffn = case.width // 64, 2 * case.width
        model = Transformer(30_000, 10, 4, case.width, heads, ffn, 256, dropout=0.1)
        inputs = torch.randint(1, 30_000, (case.batch, 44))
    fuse(model.train(), mode)
    targets, precision = torch.arange(case.batch) % 10, Precision(case.precision, inputs.device)
    before, seconds, most = peak_rss(), [], []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        model.zero_grad(set_to_none=True)
        with precision.autocast():
            logits = model(inputs)
        F.cross_entropy(logits.float(), targets).backward()
        seconds.append(time.perf_counter() - started)
        most.append((peak_rss() - before) / 1e9)
    return {
        "seconds": seconds[WARM_UP:], "gb_after_two": most[WARM_UP - 1], "gb_after_all": most[-1]
    }  # fmt: skip


def in_a_process(key: str, mode: str, setting: str, options: argparse.Namespace) -> dict:
    words = [sys.executable, __file__, "--case", key, "--child", mode]
    words += ["--steps", str(options.steps), "--threads", str(options.threads)]
    done = subprocess.run(
        words, env=os.environ | SETTINGS[setting], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(key: str, options: argparse.Namespace) -> dict:
    case = CASES[key]
    pairs = {f"{mode}, {one}": (mode, one) for mode in case.modes for one in case.settings}
    found = {name: [] for name in pairs}
    for repetition in range(options.repetitions):
        for name in list(pairs) if repetition % 2 == 0 else reversed(pairs):
            found[name].append(in_a_process(key, *pairs[name], options))
    speeds = {
        name: [case.batch / statistics.median(one["seconds"]) for one in turns]
        for name, turns in found.items()
    }
    for name, turns in found.items():
        two, last = (max(one[key] for one in turns) for key in ("gb_after_two", "gb_after_all"))
        print(f"{case.name}, {name}: {two:.2f} GB after {WARM_UP} steps, {last:.2f} GB after all")
    plain = f"none, {case.settings[0]}"
    ratios = {f"{name} / {plain}": ratio(speeds, name, plain) for name in pairs if name != plain}
    for mode in case.modes[1:]:
        for one in case.settings:
            both = f"none, {one}", f"{mode}, {one}"
            ratios[f"step time, {mode} / none, {one}"] = ratio(speeds, *both)
    taken = {name: [one["gb_after_all"] for one in turns] for name, turns in found.items()}
    return {"samples_per_second": speeds, "gb": taken, "ratios": ratios}


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--case", choices=CASES, help="(default: all)")
    words.add_argument("--steps", type=int, default=8, help="of each process (default: 8)")
    words.add_argument("--child", help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.child:
        case = CASES[options.case]
        print(json.dumps(train(case, options.child, options.steps, options.threads)))
        return
    results = {}
    for key in [options.case] if options.case else CASES:
        case = CASES[key]
        results[f"{case.name}, {case.precision}, batch {case.batch}"] = measure(key, options)
    report("Freed memory on a CPU", results, options.json)


if __name__ == "__main__":
    main()
