#!/usr/bin/env python3
"""How long a step takes on 8 to 512 GPUs in two regions, with DDP and with local steps, by
arithmetic; nothing here is measured.

    python benchmarks/local_on_paper.py

Half of the GPUs are in each region, in clusters as in scaling_on_paper.py, whose models and forms
these are. B is the speed of the link between the regions in each direction, L how long a message
takes. Of DDP the least is assumed that is possible: S bytes are reduced within each region, and
cross the link once in each direction,

    all-reduce within a region + S / B + 2 L

An averaging of local steps is computed turn by turn, as utils/distributed/ordered_sum.py has them:
the GPUs of a node share the columns out, and the nodes, one region after the other, form a chain
that sends the sum to its end and back, in up to 16 chunks. A node begins a turn when it has sent
and received everything of the one before. A message takes its latency and its bytes / (B or the
speed of a node's network cards); cards that send two chunks in a turn take twice as long. The mean
time of a step is

    DDP           computing + what of the reduction the backward pass does not hide + statistics
    local steps   computing + averagings / steps x averaging of the parameters

The averagings hide behind nothing. The agreement on stopping, 8 bytes a step late, is not waited
for.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.scaling_on_paper import (
    CLUSTERS,
    FLOAT,
    MODELS,
    SIZES,
    Cluster,
    Model,
    compute,
    exposed_ddp,
    waited_for,
)
from utils.distributed.ordered_sum import Turn, chunk_count, turns

LATENCY = 0.015  # seconds that a message takes from one region to the other
LINKS = 10, 1  # Gbit/s between the regions
# Averagings in a step. That of qsr is the paper's run of ViT-B (see local_schedules.py).
AVERAGINGS = {"constant, H 16": 1 / 16, "qsr, 10.4 %": 9711 / 93_600, "diloco, H 500": 1 / 500}


@dataclass(frozen=True)
class TwoRegions(Cluster):
    """Attributes:
    across: bytes per second from one region to the other, of all GPUs together.
    latency: seconds.
    """

    across: float = 0.0
    latency: float = LATENCY

    def all_reduce(self, length: float, gpus: int) -> float:
        """The least that is possible."""
        within = super().all_reduce(length, gpus // 2)
        return within + length / self.across + 2 * self.latency

    def ordered_sum(self, length: float, gpus: int) -> float:
        """Seconds of an averaging of `length` bytes."""
        size = min(self.node, gpus // 2)  # of a node
        # Within a node every GPU sends the others' columns, and then its part of the sum.
        within = (size - 1) / size * length / self.inside + self.base + self.step_inside
        return 2 * within + self.chain(length, gpus // size, chunk_count(int(length / size)))

    def chain(self, length: float, nodes: int, chunks: int) -> float:
        """Seconds in which the nodes send `length` bytes to the last one, and back."""
        ready = [0.0] * nodes  # when each node begins its next turn
        chunk = length / chunks
        for turn in zip(*(turns(node, nodes, chunks) for node in range(nodes)), strict=True):
            before, ready = ready, list(ready)
            for node in range(nodes - 1):
                ahead, back = turn[node].send_ahead, turn[node].from_ahead
                if ahead is None and back is None:
                    continue
                seconds = self.latency + chunk / self.across
                if node != nodes // 2 - 1:  # a link within a region
                    most = max(map(_sent, turn[node : node + 2]))
                    seconds = self.step_between + most * chunk / self.between
                end = max(before[node], before[node + 1]) + seconds
                ready[node], ready[node + 1] = max(ready[node], end), max(ready[node + 1], end)
        return max(ready)


def _sent(turn: Turn) -> int:
    """How many chunks a node sends in this turn."""
    return (turn.send_ahead is not None) + (turn.send_back is not None)


def regions(gigabits: float) -> TwoRegions:
    """Clusters with InfiniBand, and so many Gbit/s between them."""
    cluster = CLUSTERS[0]
    return TwoRegions(
        f"{gigabits:g} Gbit/s", cluster.inside, cluster.between, across=gigabits * 1e9 / 8
    )


def ddp(model: Model, cluster: Cluster, gpus: int) -> float:
    """Seconds of a step."""
    exposed = exposed_ddp(model, cluster, gpus)
    return compute(model) + exposed + waited_for(model, cluster, gpus)


def local(model: Model, cluster: TwoRegions, gpus: int, averagings: float) -> float:
    """Mean seconds of a step; `averagings`: in a step."""
    return compute(model) + averagings * cluster.ordered_sum(FLOAT * model.parameters, gpus)


def table(model: Model, cluster: TwoRegions) -> list[str]:
    """Rows in Markdown: milliseconds, and the part of them that is computing."""
    heads = ["GPUs", "ddp", *AVERAGINGS]
    rows = [f"| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
    for gpus in SIZES:
        times = [ddp(model, cluster, gpus)]
        times += [local(model, cluster, gpus, averagings) for averagings in AVERAGINGS.values()]
        cells = [f"{1e3 * seconds:,.0f} ({compute(model) / seconds:.0%})" for seconds in times]
        rows.append(f"| {gpus} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for model in MODELS:
        for gigabits in LINKS:
            print(
                f"{model.name}, batches of {model.batch} per GPU, computing "
                f"{1e3 * compute(model):.1f} ms; {gigabits} Gbit/s between the regions\n"
            )
            print("\n".join(table(model, regions(gigabits))), end="\n\n")


if __name__ == "__main__":
    main()
