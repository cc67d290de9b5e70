#!/usr/bin/env python3
"""How long a checkpoint holds up the training, in one process and divided over two.

    python benchmarks/checkpoint_stall.py

A ResNet-50 and its momentum (188 MB), on CPU processes with one thread each. The stall is the time
that `snapshot` and `Saver.save` take on the slowest rank, which is that of the copy; the rest goes
on in threads, and its speed is that until all is on disk. Between two checkpoints every rank takes
a training step, which uses memory as well. At one checkpoint a minute 600 ms are 1 %.
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import arguments, machine
from utils.checkpoints.checkpoint import Checkpoints
from utils.checkpoints.saver import Saver
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.training.progress import Progress
from utils.training.snapshot import snapshot

SIZES = (1, 2)


def divide(exchange, model: nn.Module) -> None:
    """Leaves this rank its rows of every parameter, as FSDP cuts them."""
    from utils.exchange import Rows

    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            most = -(-len(whole) // exchange.size)
            start, end = (min((exchange.rank + i) * most, len(whole)) for i in range(2))
            part = nn.Parameter(whole.detach()[start:end].clone())
            setattr(module, name, part)
            exchange.divide(part, Rows(whole.shape, start, end))


def measure(rank: int, size: int, folder: str, repetitions: int, results) -> None:
    """Puts [[seconds of the stall, seconds until it is on disk], ...] and the bytes."""
    import torch.distributed as dist

    from utils.distributed.exchange import ProcessExchange
    from utils.distributed.strategies.base import Strategy

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    exchange, of_the_saver = ProcessExchange(), ProcessExchange(dist.new_group())
    trained = ResNet(50, 10)
    model = ResNet(50, 10)
    divide(exchange, model)
    strategy = Strategy(exchange)
    strategy.wrap(model)
    trainer = SimpleNamespace(
        model=model,
        strategy=strategy,
        optimizer=build_optimizer("sgd", model, lr=0.1, weight_decay=0.0),
        progress=Progress(),
        schedule=SimpleNamespace(state_dict=dict),
        scaler=SimpleNamespace(state_dict=dict),
        average=None,
        meta=None,
        saved_settings={},
    )
    metrics = MetricsLog(Path(folder, f"metrics-{rank}.jsonl"))
    console = Console()
    saver = Saver(Checkpoints(Path(folder, "run")), metrics, console, exchange=of_the_saver)
    seconds = []
    for repetition in range(-1, repetitions):
        trained(torch.randn(8, 3, 32, 32)).sum().backward()
        trained.zero_grad()
        trainer.progress.step += 1
        exchange.barrier()
        started = time.perf_counter()
        saver.save(snapshot(trainer), None, final=False)
        stall = time.perf_counter() - started
        saver.wait()
        exchange.barrier()
        figures = exchange.gather_json([stall, time.perf_counter() - started])
        if repetition >= 0:  # the first one finds no memory yet
            seconds.append([max(column) for column in zip(*figures, strict=True)])
    if rank == 0:
        newest = max(Path(folder, "run").glob("step-*"))
        results.put((seconds, sum(path.stat().st_size for path in newest.iterdir())))
    dist.destroy_process_group()


def run(size: int, repetitions: int) -> tuple[list, int]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=measure, args=(rank, size, folder, repetitions, results))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit("a process has failed")
        return results.get()


def measured(options) -> dict:
    """Prints and gives the figures; of `options` only `repetitions` counts."""
    figures = {}
    print("  checkpoints of a ResNet-50 and its momentum")
    for size in SIZES:
        seconds, length = run(size, options.repetitions)
        figures[size] = {"bytes": length, "seconds": seconds}
        stalls, totals = zip(*seconds, strict=True)
        stall, speed = statistics.median(stalls), length / statistics.median(totals) / 1e6
        print(
            f"  {size} {'processes' if size > 1 else 'process'}: stall {1000 * stall:.0f} ms "
            f"({1000 * min(stalls):.0f} to {1000 * max(stalls):.0f} over {len(stalls)}), "
            f"{stall / 60:.2%} at one a minute; {length / 1e6:.0f} MB written, {speed:.0f} MB/s",
            flush=True,
        )
    return figures


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    state = machine()
    print(
        "checkpoint_stall: " + ", ".join(f"{key} {value}" for key, value in state.items() if value)
    )
    figures = measured(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": state, "sizes": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
