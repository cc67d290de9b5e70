#!/usr/bin/env python3
"""What it gains NGD to share the updates of its Fisher matrices among processes.

    python benchmarks/ngd_shares.py
    python benchmarks/ngd_shares.py --width 64 --depth 50

One thread for each process. At 1 and at 2 processes: the time of the optimizer's step, updates
included (the mean over a period of them), with sharing and without, in turn, and its share of a
whole training step with pictures of 32x32. At 2 processes every one trains on its own batch of the
same size, and a barrier goes before each measurement; the slowest process counts.
"""

import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import machine, parser

PERIOD = 4


def measure(rank: int, size: int, store: str, options, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from benchmarks.ngd_step import with_gradients
    from utils.distributed.exchange import ProcessExchange
    from utils.exchange import Exchange
    from utils.models.resnet import ResNet
    from utils.optim.ngd.batch import EARLY_UPDATES
    from utils.optim.ngd.optimizer import NGD

    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=120),
        )
    exchange = ProcessExchange() if size > 1 else Exchange()
    torch.manual_seed(0)
    model = ResNet(options.depth, 10, width=options.width).to(memory_format=torch.channels_last)
    inputs = torch.randn(options.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.arange(options.batch) % 10

    def train() -> None:
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()

    train()
    parameters = with_gradients(model, torch.device("cpu"))
    others = {"shared": exchange, "alone": Exchange()} if size > 1 else {"alone": exchange}
    optimizers = {name: NGD(parameters, exchange=each) for name, each in others.items()}
    for optimizer in optimizers.values():
        for _ in range(EARLY_UPDATES + PERIOD - EARLY_UPDATES % PERIOD):
            optimizer.step()

    def timed(call) -> float:
        """ms"""
        exchange.barrier()
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)

    def period(optimizer) -> float:
        return sum(timed(optimizer.step) for _ in range(PERIOD)) / PERIOD

    figures = {name: [] for name in (*optimizers, "forward and backward")}
    for repetition in range(options.repetitions):
        for name in list(optimizers)[:: 1 if repetition % 2 else -1]:
            figures[name].append(period(optimizers[name]))
    for _ in range(options.repetitions):
        figures["forward and backward"].append(timed(train))
    sent = 0
    if size > 1:
        sent = sum(each.longest * 4 for each in optimizers["shared"]._shares) / PERIOD
    pipe.send((figures, sent))


def of_size(size: int, options) -> tuple[dict, float]:
    """(figures of the slowest process, bytes that each sends in a step)"""
    context, received = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=measure, args=(rank, size, f"{folder}/store", options, theirs)
            )
            process.start()
            theirs.close()  # so that the end of a process is the end of its pipe
            received.append((ours, process))
        answers = [pipe.recv() for pipe, _ in received]
        for _, process in received:
            process.join()
    slowest = {
        name: [max(values) for values in zip(*(each[name] for each, _ in answers), strict=True)]
        for name in answers[0][0]
    }
    return slowest, answers[0][1]


def measured(options) -> dict:
    """Prints and gives the figures; `options` as `main` reads them."""
    results = {}
    print(f"  NGD's shared updates: ResNet-{options.depth}, width {options.width}")
    for size in (1, 2):
        figures, sent = of_size(size, options)
        results[size] = {"milliseconds": figures, "bytes_per_step": sent}
        rest = statistics.median(figures["forward and backward"])
        print(f"  {size} process{'es' if size > 1 else ''}: forward and backward {rest:.1f} ms")
        for name in figures.keys() - {"forward and backward"}:
            step = statistics.median(figures[name])
            print(f"    step, {name:8}{step:8.1f} ms, {step / (step + rest):.1%} of the training")
        if size > 1:
            pairs = [a / b for a, b in zip(figures["alone"], figures["shared"], strict=True)]
            median = statistics.median(pairs)
            print(f"    alone / shared {median:.2f} ({min(pairs):.2f} to {max(pairs):.2f})")
            print(f"    each sends {sent / 1e6:.3f} MB a step")
    return results


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--depth", type=int, default=18)
    words.add_argument("--width", type=int, default=16)
    words.add_argument("--batch", type=int, default=64, help="samples of a process (default: 64)")
    options = words.parse_args()
    state = machine() | {"threads": 1}
    print("ngd_shares: " + ", ".join(f"{key} {value}" for key, value in state.items() if value))
    results = measured(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": state, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
