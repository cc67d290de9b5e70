#!/usr/bin/env python3
"""What NGD gains by dividing the updates of its Fisher matrices among processes.

    python benchmarks/ngd_shares.py
    python benchmarks/ngd_shares.py --width 64 --depth 50

One thread for each process. In one process and in two: the time of the optimizer's step, updates
included (the mean over a period of them), with the updates divided and without, in turn, and the
time of a forward and a backward pass over pictures of 32x32. Each process trains on its own batch;
a barrier goes before each measurement, and the slowest process counts.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, parser, ratio, side_by_side, spread, write_json
from benchmarks.ngd_step import PERIOD, with_gradients
from benchmarks.ranks import Ranks
from utils.exchange import Exchange
from utils.models.resnet import ResNet
from utils.optim.ngd.batch import EARLY_UPDATES
from utils.optim.ngd.optimizer import NGD

BATCH = 64  # samples of a process
DIVIDED, ALONE, PASSES = "step, updates divided", "step, all updates", "forward and backward"


def build_steps(exchange, folder: str, options) -> Callable:
    """(what to do) -> ms of it; of "bytes", what a process sends in a step."""
    torch.manual_seed(0)
    model = ResNet(options.depth, 10, width=options.width).to(memory_format=torch.channels_last)
    inputs = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % 10

    def passes() -> None:
        F.cross_entropy(model(inputs), labels).backward()

    passes()
    parameters = list(with_gradients(model, torch.device("cpu")).parameters())
    optimizers = {
        DIVIDED: NGD(parameters, exchange=exchange),
        ALONE: NGD(parameters, exchange=Exchange()),
    }
    for optimizer in optimizers.values():
        for _ in range(EARLY_UPDATES + PERIOD - EARLY_UPDATES % PERIOD):
            optimizer.step()

    def timed(call: Callable) -> float:
        exchange.barrier()
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)

    def work(what: str) -> float:
        if what == PASSES:
            return timed(passes)
        if what == "bytes":
            return sum(4 * each.longest for each in optimizers[DIVIDED]._shares) / PERIOD
        return sum(timed(optimizers[what].step) for _ in range(PERIOD)) / PERIOD

    return work


def measure(size: int, options) -> tuple[dict[str, list[float]], float]:
    """(milliseconds on the slowest process, bytes that each sends in a step)"""
    with Ranks(size, build_steps, options) as ranks:
        steps = (DIVIDED, ALONE) if size > 1 else (ALONE,)
        figures = {}
        for names in (steps, (PASSES,)):  # passes apart: they add to the gradients
            runs = {name: lambda name=name: max(ranks(name)) for name in names}
            figures |= side_by_side(runs, options.repetitions)
        return figures, ranks("bytes")[0] if size > 1 else 0.0


def main() -> None:
    flags = parser(__doc__, threads=None)
    flags.add_argument("--depth", type=int, default=18)
    flags.add_argument("--width", type=int, default=16)
    options = flags.parse_args()
    torch.set_num_threads(1)
    print(f"ngd_shares: ResNet-{options.depth} of width {options.width}\n  {in_words(machine())}")
    results = {}
    for size in (1, 2):
        figures, sent = measure(size, options)
        results[size] = {"milliseconds": figures, "bytes_per_step": sent}
        medians = {name: statistics.median(values) for name, values in figures.items()}
        rest = medians.pop(PASSES)
        print(f"  processes: {size}; {PASSES} {rest:.1f} ms")
        for name, step in medians.items():
            print(f"    {name:24}{step:8.1f} ms, {step / (step + rest):.1%} of the training step")
        if size > 1:
            print(f"    {ALONE} / {DIVIDED}: {spread(ratio(figures, ALONE, DIVIDED))}")
            print(f"    each sends {sent / 1e6:.3f} MB a step")
    if options.json:
        write_json(options.json, {"machine": machine(), "results": results})


if __name__ == "__main__":
    main()
