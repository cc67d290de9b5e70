#!/usr/bin/env python3
"""What the C library does with freed memory on a CPU: the time of a step, and what it takes.

    python benchmarks/host_memory.py
    python benchmarks/host_memory.py --batch 192 --steps 4 --repetitions 2

A process for each setting of glibc's malloc and each mode of --fused, in turn; it trains a
ResNet-50 (CIFAR stem, bf16, channels_last) on random pictures, forward and backward passes alone.
Gigabytes are what the process has taken at most beyond what it had before the first step: after two
steps, and after all.

    as it is      tensors of 32 MB and more go back to the system when they are freed, and come
                  anew, page by page
    kept          nothing goes back
    kept, large   the same, in pages of 2 MB
    given back    all of 2 MB and more goes back
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratio, report

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SETTINGS = {
    "as it is": {},
    "kept": KEPT,
    "kept, large": KEPT | {"THP_MEM_ALLOC_ENABLE": "1"},
    "given back": {"MALLOC_MMAP_THRESHOLD_": str(2 << 20), "MALLOC_MMAP_MAX_": str(1 << 30)},
}
MODES = ("none", "memory")
WARM_UP = 2


def taken() -> float:
    """Gigabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def train(mode: str, batch: int, steps: int, threads: int) -> dict:
    """In this process: seconds of each step after the warm-up, and gigabytes."""
    import torch
    import torch.nn.functional as F

    from utils.fused import fuse
    from utils.models.resnet import ResNet
    from utils.training.objective import Precision

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = fuse(ResNet(50, 10).to(memory_format=torch.channels_last), mode)
    x = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    targets, precision = torch.arange(batch) % 10, Precision("bf16", torch.device("cpu"))
    before, seconds, most = taken(), [], []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        model.zero_grad(set_to_none=True)
        with precision.autocast():
            logits = model(x)
        F.cross_entropy(logits.float(), targets).backward()
        seconds.append(time.perf_counter() - started)
        most.append(taken() - before)
    return {
        "seconds": seconds[WARM_UP:], "gb_after_two": most[WARM_UP - 1], "gb_after_all": most[-1]
    }  # fmt: skip


def in_a_process(setting: str, mode: str, options: argparse.Namespace) -> dict:
    words = [sys.executable, __file__, "--child", mode, "--batch", str(options.batch)]
    words += ["--steps", str(options.steps), "--threads", str(options.threads)]
    done = subprocess.run(
        words, env=os.environ | SETTINGS[setting], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--batch", type=int, default=64, help="pictures (default: 64)")
    words.add_argument("--steps", type=int, default=8, help="of each process (default: 8)")
    words.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.child:
        print(json.dumps(train(options.child, options.batch, options.steps, options.threads)))
        return
    cases = {f"{mode}, {setting}": (setting, mode) for mode in MODES for setting in SETTINGS}
    found = {name: [] for name in cases}
    for repetition in range(options.repetitions):
        for name in list(cases) if repetition % 2 == 0 else reversed(cases):
            found[name].append(in_a_process(*cases[name], options))
    speeds = {
        name: [options.batch / statistics.median(one["seconds"]) for one in turns]
        for name, turns in found.items()
    }
    for name, turns in found.items():
        two, last = (max(one[key] for one in turns) for key in ("gb_after_two", "gb_after_all"))
        print(f"{name}: {two:.2f} GB after {WARM_UP} steps, {last:.2f} GB after all")
    plain, case = "none, as it is", f"ResNet-50, bf16, batch {options.batch}"
    ratios = {f"{name} / {plain}": ratio(speeds, name, plain) for name in cases if name != plain}
    for setting in SETTINGS:
        pair = f"none, {setting}", f"memory, {setting}"
        ratios[f"step time, memory / none, {setting}"] = ratio(speeds, *pair)
    taken_by = {name: [one["gb_after_all"] for one in turns] for name, turns in found.items()}
    result = {"samples_per_second": speeds, "gb": taken_by, "ratios": ratios}
    report("Freed memory on a CPU", {case: result}, options.json)


if __name__ == "__main__":
    main()
