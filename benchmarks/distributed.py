#!/usr/bin/env python3
"""What it costs to train with two processes instead of one.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --only scaling --repetitions 15

Processes on the CPU, with one thread each, that communicate by gloo over loopback; the training
loop is the entries' own, over random pictures of 32x32.

`scaling`: samples per second of two processes over those of one, in turn; every process has batches
of the same size. `copies` are two processes that train independently: the most that the machine
gives to two at once, and the limit of the other figures.

`bytes`: calls of each collective in a step, and the bytes that a process sends by the ring
algorithm. A log line comes every 20 steps; NGD updates its matrices every 4.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.collectives import calls_of_runs, per_step, sent, total_sent
from benchmarks.common import machine, parser, ratios, report, side_by_side, write_json
from benchmarks.loop import make_trainer, narrow_resnet, steps_among_ranks
from benchmarks.ranks import Ranks
from utils.exchange import Exchange
from utils.launch.signals import Signals

BATCH = 64  # samples of a process
CASES = {  # of what is counted: strategy, optimizer, accumulation
    "ddp, sgd": ("ddp", "sgd", 1),
    "ddp, sgd, accumulation of 4": ("ddp", "sgd", 4),
    "ddp, ngd": ("ddp", "ngd", 1),
    "fsdp, sgd": ("fsdp", "sgd", 1),
    "fsdp, ngd": ("fsdp", "ngd", 1),
}
# Steps of three runs of one training: NGD updates in each of its first ten; the third run has 20
# steps and one log line more than the second.
RUNS = (20, 4, 24)


def build_training(exchange, folder: str, strategy: str, alone: bool = False) -> Callable:
    """work(steps) -> samples per second of this process; `alone`: it knows of no other."""
    trainer = make_trainer(
        narrow_resnet(), Path(folder, str(exchange.rank)), Signals(), batch=BATCH,
        exchange=Exchange() if alone else exchange, strategy=strategy,
    )  # fmt: skip
    return steps_among_ranks(trainer, exchange)


def build_counting(exchange, folder: str) -> Callable:
    """work(case) -> calls of a step on this rank."""

    def work(name: str) -> dict:
        strategy, optimizer, accumulation = CASES[name]
        trainer = make_trainer(
            narrow_resnet(), Path(folder, f"{name}-{exchange.rank}"), Signals(), batch=2,
            exchange=exchange, strategy=strategy, optimizer=optimizer, accumulation=accumulation,
        )  # fmt: skip
        _, second, third = calls_of_runs(trainer, RUNS)
        return per_step(second, third, RUNS[2] - RUNS[1])

    return work


def scaling(steps: int, repetitions: int) -> dict:
    kinds = {
        "one process": (1, "ddp"),
        "ddp": (2, "ddp"),
        "fsdp": (2, "fsdp"),
        "copies": (2, "ddp", True),
    }
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(Ranks(size, build_training, *rest))
            for name, (size, *rest) in kinds.items()
        }
        # The slowest of a group counts for all of them.
        runs = {
            name: lambda group=group: group.size * min(group(steps))
            for name, group in groups.items()
        }
        figures = side_by_side(runs, repetitions)
    pairs = [(name, "one process") for name in ("ddp", "fsdp", "copies")]
    pairs += [(name, "copies") for name in ("ddp", "fsdp")]
    return {"samples_per_second": figures, "ratios": ratios(figures, *pairs)}


def count_bytes() -> dict:
    elements = sum(parameter.numel() for parameter in narrow_resnet().parameters())
    print(f"bytes: {elements:,} parameters, two processes; a step")
    results = {"parameters": elements}
    with Ranks(2, build_counting) as ranks:
        for name in CASES:
            calls = max(ranks(name), key=lambda each: total_sent(each, 2))
            print(f"  {name}: {total_sent(calls, 2) / 1e6:.3f} MB sent")
            print(f"    {'calls':>8}{'bytes given':>14}{'bytes sent':>14}")
            for (kind, length), number in calls.items():
                total = number * sent(kind, length, 2)
                print(f"    {number:8.2f}{length:14,}{total:14,.0f}  {kind}", flush=True)
            results[name] = [[*key, number] for key, number in calls.items()]
    return results


def main() -> None:
    flags = parser(__doc__, threads=None)
    flags.add_argument("--only", choices=("scaling", "bytes"), help="(default: both)")
    flags.add_argument("--steps", type=int, default=10, help="of a run (default: 10)")
    options = flags.parse_args()
    torch.set_num_threads(1)
    counted, results = None, {}
    if options.only != "bytes":
        case = f"scaling: batches of {BATCH}, runs of {options.steps} steps"
        results[case] = scaling(options.steps, options.repetitions)
    if options.only != "scaling":
        counted = count_bytes()
    report("distributed: ResNet-18 of width 16, gloo over loopback", results, None)
    if options.json:
        write_json(options.json, {"machine": machine(), "results": results, "bytes": counted})


if __name__ == "__main__":
    main()
