#!/usr/bin/env python3
"""What it costs to train with two processes instead of one.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --only scaling --repetitions 15

Processes on the CPU, with one thread each, that talk by gloo over loopback; the training loop is
the one of the entries, over random pictures of 32x32.

`scaling`: samples per second of two processes over those of one, in turn, while the others wait;
every process has batches of the same size. `copies` are two processes that train without knowing
of each other: what the machine gives to two at once, the limit of the other figures.

`bytes`: calls of each collective in a step, and bytes that a process sends (counted; the sum by
the ring algorithm). A log line comes every 20 steps; NGD updates its matrices every 4.

`ngd`: the share of NGD's step at one and two processes (see optim/ngd/shares.py).

`checkpoint`: the stall of the training, and the time until all is on disk (see
checkpoint_stall.py).
"""

import contextlib
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import checkpoint_stall, ngd_shares
from benchmarks.collectives import Collectives, per_step, sent, total_sent
from benchmarks.common import machine, parser, ratio, side_by_side, silent
from benchmarks.loop import make_trainer, take_steps
from benchmarks.ranks import Ranks
from utils.exchange import Exchange
from utils.launch.signals import Signals
from utils.models.resnet import ResNet

PARTS = ("scaling", "bytes", "ngd", "checkpoint")
CASES = {  # of what is counted: strategy, optimizer, accumulation
    "ddp, sgd": ("ddp", "sgd", 1),
    "ddp, sgd, accumulation of 4": ("ddp", "sgd", 4),
    "ddp, ngd": ("ddp", "ngd", 1),
    "fsdp, sgd": ("fsdp", "sgd", 1),
    "fsdp, ngd": ("fsdp", "ngd", 1),
}
# Steps of three runs of a training: NGD's first ten have an update each; between the other two lie
# 20 steps more, and one more log line.
RUNS = (20, 4, 24)


def network(depth: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return ResNet(depth, 10, width).to(memory_format=torch.channels_last)


def build_training(exchange, folder: str, options, strategy: str, alone: bool = False):
    """work(steps) -> samples per second of this process; `alone`: it knows of no other."""
    rank = exchange.rank
    trainer = make_trainer(
        network(options.depth, options.width),
        Path(folder, str(rank)),
        Signals(),
        batch=options.batch,
        exchange=Exchange() if alone else exchange,
        strategy=strategy,
    )

    def work(steps: int) -> float:
        exchange.barrier()
        with silent():
            return take_steps(trainer, steps)

    return work


def build_counting(exchange, folder: str, options):
    """work(case) -> calls of a step on this rank."""

    def work(name: str) -> dict:
        strategy, optimizer, accumulation = CASES[name]
        trainer = make_trainer(
            network(options.depth, options.width),
            Path(folder, f"{name}-{exchange.rank}"),
            Signals(),
            batch=2,
            exchange=exchange,
            strategy=strategy,
            optimizer=optimizer,
            accumulation=accumulation,
        )
        runs, hooked = [], Collectives()
        hooked.hook(trainer.strategy)
        with hooked, silent():
            for steps in RUNS:
                hooked.calls.clear()
                take_steps(trainer, steps)
                runs.append(hooked.calls.copy())
        return per_step(runs[1], runs[2], RUNS[2] - RUNS[1])

    return work


def scaling(options) -> dict:
    kinds = {
        "one process": (1, "ddp"),
        "ddp": (2, "ddp"),
        "fsdp": (2, "fsdp"),
        "copies": (2, "ddp", True),
    }
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(Ranks(size, build_training, options, *rest))
            for name, (size, *rest) in kinds.items()
        }
        # The slowest of a group counts for all of them.
        runs = {
            name: lambda group=group: group.size * min(group(options.steps))
            for name, group in groups.items()
        }
        figures = side_by_side(runs, options.repetitions)
    ratios = {f"{name} / one process": ratio(figures, name, "one process")
              for name in ("ddp", "fsdp", "copies")}  # fmt: skip
    ratios |= {f"{name} / copies": ratio(figures, name, "copies") for name in ("ddp", "fsdp")}
    print(f"  scaling: batches of {options.batch}, runs of {options.steps} steps, samples/s")
    for name, values in figures.items():
        print(f"    {name:24}{statistics.median(values):10.0f}")
    for name, value in ratios.items():
        print(
            f"    {name:24}{value['median']:10.2f} times ({value['min']:.2f} to "
            f"{value['max']:.2f} over {options.repetitions} pairs)"
        )
    return {"samples_per_second": figures, "ratios": ratios}


def count_bytes(options) -> dict:
    model = network(options.depth, options.width)
    elements = sum(parameter.numel() for parameter in model.parameters())
    print(f"  bytes: {elements:,} parameters, two processes; a step")
    results = {"parameters": elements}
    with Ranks(2, build_counting, options) as ranks:
        for name in CASES:
            calls = max(ranks(name), key=lambda each: total_sent(each, 2))
            print(f"    {name}: {total_sent(calls, 2) / 1e6:.3f} MB sent")
            print(f"      {'calls':>8}{'bytes given':>14}{'bytes sent':>14}")
            for (kind, length), number in calls.items():
                total = number * sent(kind, length, 2)
                print(f"      {number:8.2f}{length:14,}{total:14,.0f}  {kind}")
            results[name] = [[*key, number] for key, number in calls.items()]
    return results


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--only", choices=PARTS)
    words.add_argument("--depth", type=int, default=18)
    words.add_argument("--width", type=int, default=16)
    words.add_argument("--batch", type=int, default=64, help="samples of a process (default: 64)")
    words.add_argument("--steps", type=int, default=10, help="of a run (default: 10)")
    words.set_defaults(threads=1)
    options = words.parse_args()
    torch.set_num_threads(1)
    parts = {
        "scaling": scaling,
        "bytes": count_bytes,
        "ngd": ngd_shares.measured,
        "checkpoint": checkpoint_stall.measured,
    }
    state = machine() | {"threads": 1}
    print(f"distributed: ResNet-{options.depth} of width {options.width}, gloo over loopback")
    print("  " + ", ".join(f"{key} {value}" for key, value in state.items() if value), flush=True)
    results = {}
    for name in [options.only] if options.only else PARTS:
        results[name] = parts[name](options)
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"machine": state, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
