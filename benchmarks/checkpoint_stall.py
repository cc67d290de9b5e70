#!/usr/bin/env python3
"""How long a checkpoint holds up the training, in one process and divided over two.

    python benchmarks/checkpoint_stall.py

A ResNet-50 and its momentum (188 MB), on CPU processes with one thread each. The stall is the time
that `snapshot` and `Saver.save` take on the slowest rank, in which they copy; threads write the
copy, at the speed that is shown. Between two checkpoints every rank takes a training step, which
uses memory as well.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, median_and_range, parser, spread, write_json
from benchmarks.ranks import Ranks
from utils.checkpoints.checkpoint import Checkpoints
from utils.checkpoints.saver import Saver
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.training.progress import Progress

SIZES = (1, 2)


def divide(exchange, model: nn.Module) -> None:
    """Leaves this rank its rows of every parameter, as FSDP divides them."""
    from utils.exchange import Rows

    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            most = -(-len(whole) // exchange.size)
            start, end = (min((exchange.rank + i) * most, len(whole)) for i in range(2))
            part = nn.Parameter(whole.detach()[start:end].clone())
            setattr(module, name, part)
            exchange.divide(part, Rows(whole.shape, start, end))


class Saving(NamedTuple):
    """A checkpoint, as one rank sees it."""

    stall: float  # seconds
    seconds: float  # until all ranks have written
    bytes: int  # of all files


def build_saving(exchange, folder: str) -> Callable:
    """A function that saves a checkpoint, and measures that."""
    import torch.distributed as dist

    from utils.distributed.exchange import ProcessExchange
    from utils.distributed.strategies.base import Strategy

    trained, model, savers_exchange = ResNet(50, 10), ResNet(50, 10), None
    if exchange.size > 1:
        divide(exchange, model)
        savers_exchange = ProcessExchange(dist.new_group())
    strategy = Strategy(model, exchange)
    train_step = SimpleNamespace(
        strategy=strategy,
        optimizer=build_optimizer("sgd", model, lr=0.1, weight_decay=0.0),
        progress=Progress(),
        schedule=SimpleNamespace(state_dict=dict),
        scaler=SimpleNamespace(state_dict=dict),
        average=None,
        meta=None,
    )
    store = Checkpoints(Path(folder, "run"))
    metrics = MetricsLog(Path(folder, f"metrics-{exchange.rank}.jsonl"))
    saver = Saver(store, metrics, Console(), exchange=savers_exchange)

    def save() -> Saving:
        trained(torch.randn(8, 3, 32, 32)).sum().backward()
        trained.zero_grad()
        train_step.progress.step += 1
        exchange.barrier()
        started = time.perf_counter()
        saver.save(train_step.snapshot(), None, final=False)
        stall = time.perf_counter() - started
        saver.wait()
        exchange.barrier()
        seconds = time.perf_counter() - started
        newest = max(Path(folder, "run").glob("step-*"))
        return Saving(stall, seconds, sum(path.stat().st_size for path in newest.iterdir()))

    return save


def measure(size: int, repetitions: int) -> dict:
    """The figures of the slowest rank for each of several checkpoints."""
    with Ranks(size, build_saving) as ranks:
        ranks()  # allocates the memory for the copies
        rows = [list(map(max, zip(*ranks(), strict=True))) for _ in range(repetitions)]
    stalls, totals, lengths = zip(*rows, strict=True)
    return {"bytes": lengths[-1], "stall": stalls, "seconds": totals}


def main() -> None:
    options = parser(__doc__, threads=None).parse_args()
    torch.set_num_threads(1)
    print(f"checkpoint_stall: a ResNet-50 and its momentum\n  {in_words(machine())}")
    results = {}
    for size in SIZES:
        results[size] = found = measure(size, options.repetitions)
        stall = median_and_range(1000 * seconds for seconds in found["stall"])
        megabytes = found["bytes"] / 1e6
        print(
            f"  processes: {size}; stall {spread(stall, 0)} ms, {stall['median'] / 60_000:.2%} at "
            f"one a minute; {megabytes:.0f} MB at "
            f"{megabytes / statistics.median(found['seconds']):.0f} MB/s",
            flush=True,
        )
    if options.json:
        write_json(options.json, {"machine": machine(), "sizes": results})


if __name__ == "__main__":
    main()
