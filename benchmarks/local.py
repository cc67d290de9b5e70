#!/usr/bin/env python3
"""What local steps send and how fast they train, against DDP, over a fast and over slow links.

    sudo python benchmarks/local.py
    sudo python benchmarks/local.py --links 10 --repetitions 3

Two processes with one thread each train a ResNet-18 of width 16 (2.8 MB of gradients) with SGD, by
gloo; the training loop is the entries' own, over random pictures of 32x32, in batches of 64 per
process, as if each were on a node of its own. In turn: DDP; local steps that average every 16
steps; local steps that never average, which is the limit of what the network allows.

First over loopback, then between two network namespaces, whose cable is slowed down to so many
Mbit/s in each direction (a token bucket, tc-tbf). Namespaces need Linux and root's rights; without
them loopback alone is measured. Bytes are what a process sends, by the ring algorithm where it is a
collective; on the cable, what the kernel has counted there, with the headers of TCP.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.collectives import calls_of_runs, per_step, total_sent
from benchmarks.common import machine, parser, ratios, report, side_by_side, write_json
from benchmarks.loop import STEPS, make_trainer, narrow_resnet, steps_among_ranks
from benchmarks.networks import TwoNetworks, enter
from benchmarks.ranks import Ranks
from utils.launch.signals import Signals

BATCH, ROUND = 64, 16  # samples of a process; steps of a round
KINDS = {"ddp": None, f"local, H {ROUND}": ROUND, "local, never": STEPS}  # name -> round_steps


def worker(exchange, folder: str, round_steps: int | None, batch: int):
    """The trainer of a process, which has a node of its own."""
    exchange.local_rank = 0
    trainer = make_trainer(
        narrow_resnet(), Path(folder, str(exchange.rank)), Signals(), batch=batch,
        exchange=exchange, round_steps=round_steps,
    )  # fmt: skip
    trainer.save = lambda final=False: None  # what a run does at its end is no part of a step
    return trainer


def build_training(exchange, folder: str, round_steps: int | None) -> Callable:
    """work(steps) -> samples per second of this process."""
    return steps_among_ranks(worker(exchange, folder, round_steps, BATCH), exchange)


def build_counting(exchange, folder: str, round_steps: int | None) -> Callable:
    """work() -> the bytes that this process sends in a step, which do not depend on the batch."""

    def work() -> float:
        trainer = worker(exchange, folder, round_steps, batch=2)
        runs = calls_of_runs(trainer, (ROUND, 2 * ROUND))
        return total_sent(per_step(*runs, ROUND), exchange.size)

    return work


def count_bytes() -> dict[str, float]:
    """Of each kind."""
    sent = {}
    for name, round_steps in KINDS.items():
        with Ranks(2, build_counting, round_steps) as ranks:
            sent[name] = max(ranks())
    return sent


def measure(networks: TwoNetworks | None, repetitions: int) -> dict:
    """Of a link; None: loopback."""
    first = None if networks is None else functools.partial(enter, networks.names)
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(Ranks(2, build_training, round_steps, first=first))
            for name, round_steps in KINDS.items()
        }
        # The slower of the two counts for both.
        runs = {name: lambda group=group: 2 * min(group(ROUND)) for name, group in groups.items()}
        for group in groups.values():
            group(1)  # to warm up
        on_cable = {}
        for name, group in groups.items() if networks is not None else ():
            before = networks.sent_bytes()
            group(ROUND)
            on_cable[name] = (networks.sent_bytes() - before) / ROUND
        figures = side_by_side(runs, repetitions, warm_up=False)
    others = list(KINDS)[1:]
    return {
        "samples_per_second": figures,
        "ratios": ratios(figures, *((name, "ddp") for name in others)),
        "on the cable": on_cable,
    }


def main() -> None:
    flags = parser(__doc__, repetitions=5, threads=None)
    flags.add_argument(
        "--links", type=int, nargs="*", default=[0, 100, 10],
        help="Mbit/s; 0: loopback (default: 0 100 10)",
    )  # fmt: skip
    options = flags.parse_args()
    torch.set_num_threads(1)
    results, sent = {}, count_bytes()
    print("MB that a process sends in a step")
    for kind, count in sent.items():
        print(f"  {kind:28} {count / 1e6:8.3f}", flush=True)
    for megabits in options.links:
        name = f"{megabits} Mbit/s" if megabits else "loopback"
        with contextlib.ExitStack() as stack:
            networks = None
            if megabits:
                try:
                    networks = stack.enter_context(TwoNetworks(1e6 * megabits))
                except OSError as error:
                    print(f"{name}: left out, network namespaces are not permitted here ({error})")
                    continue
            results[name] = measure(networks, options.repetitions)
        for kind, count in results[name]["on the cable"].items():
            print(f"  {kind:28} {count / 1e6:8.3f} on the cable of {name}", flush=True)
    if results:
        report(
            f"local steps: ResNet-18 of width 16, batches of {BATCH}, two processes, gloo",
            results,
            None,
        )
    if options.json:
        write_json(options.json, {"machine": machine(), "bytes": sent, "results": results})


if __name__ == "__main__":
    main()
