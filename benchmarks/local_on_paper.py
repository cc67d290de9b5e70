#!/usr/bin/env python3
"""How long a step takes on 8 to 512 GPUs in two regions, with DDP and with local steps, by
arithmetic; nothing here is measured.

    python benchmarks/local_on_paper.py

Half of the GPUs are in each region, in clusters as in scaling_on_paper.py, whose models and forms
these are. B is the speed of the link between the regions in each direction, L how long a message
takes. S bytes are reduced in

    all-reduce within a region + C S / B + 2 L

C is how often they cross the link. If each region first added up its own, C would be 1, the least
that is possible: this is assumed of DDP. The averaging of local steps adds in the order of workers,
so that the number of processes changes no bit: all N GPUs send each other a part of their
parameters, and then gather the sums, C = N / 4 + 1 (`sum_rows` in utils/distributed/exchange.py).
The mean time of a step is

    DDP           computing + what of the reduction the backward pass does not hide + statistics
    local steps   computing + averagings / steps x reduction of the parameters

The averagings hide behind nothing. The agreement on stopping, 8 bytes a step late, is not waited
for.
"""

import argparse
import sys
from dataclasses import dataclass, replace
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

LATENCY = 0.015  # seconds that a message takes from one region to the other
LINKS = 10, 1  # Gbit/s between the regions
# Averagings in a step. That of qsr is the paper's run of ViT-B (see local_schedules.py).
SHARES = {"constant, H 16": 1 / 16, "qsr, 10.4 %": 9711 / 93_600, "diloco, H 500": 1 / 500}


@dataclass(frozen=True)
class TwoRegions(Cluster):
    """Attributes:
    across: bytes per second from one region to the other, of all GPUs together.
    latency: seconds.
    in_order: what is reduced is added in the order of workers.
    """

    across: float = 0.0
    latency: float = LATENCY
    in_order: bool = False

    def crossings(self, gpus: int) -> float:
        return gpus / 4 + 1 if self.in_order else 1.0

    def all_reduce(self, length: float, gpus: int) -> float:
        across = self.crossings(gpus) * length / self.across
        return super().all_reduce(length, gpus // 2) + across + 2 * self.latency


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


def local(model: Model, cluster: Cluster, gpus: int, share: float) -> float:
    """Mean seconds of a step; `share`: averagings in a step."""
    return compute(model) + share * cluster.all_reduce(FLOAT * model.parameters, gpus)


def table(model: Model, cluster: TwoRegions) -> list[str]:
    """Rows in Markdown: milliseconds, and the part of them that is computing."""
    first = next(iter(SHARES))
    heads = ["GPUs", "ddp", *SHARES, f"{first}, each region added up first"]
    rows = [f"| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
    in_order = replace(cluster, in_order=True)
    for gpus in SIZES:
        times = [ddp(model, cluster, gpus)]
        times += [local(model, in_order, gpus, share) for share in SHARES.values()]
        times.append(local(model, cluster, gpus, SHARES[first]))
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
