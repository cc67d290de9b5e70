#!/usr/bin/env python3
"""How long a training step takes on 8 to 512 GPUs, by arithmetic; nothing here is measured.

    python benchmarks/scaling_on_paper.py
    python benchmarks/scaling_on_paper.py --plot benchmarks/results/distributed/scaling.png

A step is the computation of one GPU, which does not depend on their number, plus the part of the
communication and of NGD that does not overlap with it:

    step = compute + exposed gradient (or weights) + statistics + NGD
    all-reduce of S bytes by N GPUs on M nodes, the faster of
        ring: 2 (N - 1) / N S / B + 2 (N - M) l + 2 (M - 1) L
        tree: 2 S / B + 2 (N / M - 1) l + 2 log2(M) L
    all-gather to S bytes, or reduce-scatter of them, by the ring:
        (N - 1) / N S / B + (N - M) l + (M - 1) L

B is the speed of the slower link: inside a node that of a GPU, between nodes that of all network
cards of a node, since as many rings go through it as it has cards. l and L are what a step inside
a node and between nodes takes, and a base is added to every collective. The forms are NCCL's own
model of itself (ncclTopoTuneModel in its src/graph/tuning.cc); S / B is that of nccl-tests
(doc/PERFORMANCE.md).

Assumed:
- The backward pass takes 2/3 of the computing, gradients become ready evenly over it, DDP sends
  them in buckets of 25 MiB, the first one of 1 MiB, one after the other, in float32; computing is
  not slowed down by that. FSDP gathers the next unit's weights while one computes; units are equal.
- BatchNorm's statistics with the loss (float64), and with FSDP the gradient's norm, are waited for.
- NGD's products run at half of the GPU's float32 speed. The costliest update of one tensor's axis
  cannot be divided. Every rank sends as much as the one that has the most.
- Nobody waits for data, for a slower GPU or for the host.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

SIZES = (8, 16, 32, 64, 128, 256, 512)
FLOAT = 4  # bytes
MiB = 2**20
BUCKET, FIRST_BUCKET = 25 * MiB, MiB  # DistributedDataParallel's defaults
BACKWARD = 2 / 3  # of the computing
UPDATE_PERIOD = 4  # steps between two updates of NGD's matrices
EVERYBODY = 0.05  # of an update, which every rank makes (see utils/optim/ngd/shares.py)


@dataclass(frozen=True)
class Model:
    """Attributes:
    parameters: how many.
    units: how many parts FSDP gathers one after the other.
    batch, samples_per_second: of one GPU without communication.
    statistics: how many numbers BatchNorm's running statistics have.
    precondition, update: multiplications of NGD, in a step without an update and in an update.
    largest_update: multiplications in the update of one tensor's axis, the costliest.
    fisher, largest_fisher: how many numbers an update changes, of all axes and of the largest.
    """

    name: str
    parameters: int
    units: int
    batch: int
    samples_per_second: float
    statistics: int
    precondition: float
    update: float
    largest_update: float
    fisher: int
    largest_fisher: int


@dataclass(frozen=True)
class Cluster:
    """Attributes:
    inside, between: bytes per second of a GPU to the others of its node, and of a node to others.
    step_inside, step_between, base: seconds, of a collective.
    products: multiplications per second of a GPU, of NGD.
    """

    name: str
    inside: float
    between: float
    step_inside: float = 3.4e-6
    step_between: float = 14e-6
    base: float = 8.4e-6
    products: float = 19.5e12 / 2 / 2  # float32 of an A100 (its data sheet); two in a multiply-add
    node: int = 8  # GPUs

    def nodes(self, gpus: int) -> int:
        return max(1, gpus // self.node)

    def speed(self, gpus: int) -> float:
        return self.inside if gpus <= self.node else min(self.inside, self.between)

    def steps(self, gpus: int) -> float:
        """Seconds of one way round the ring, but for the bytes."""
        nodes = self.nodes(gpus)
        return (gpus - nodes) * self.step_inside + (nodes - 1) * self.step_between

    def all_reduce(self, length: float, gpus: int) -> float:
        if gpus == 1:
            return 0.0
        nodes, seconds = self.nodes(gpus), 2 * length / self.speed(gpus)
        ring = (gpus - 1) / gpus * seconds + 2 * self.steps(gpus)
        hops = (gpus / nodes - 1) * self.step_inside + math.log2(nodes) * self.step_between
        return self.base + min(ring, seconds + 2 * hops)

    def all_gather(self, length: float, gpus: int) -> float:
        """To `length` bytes on each; a reduce-scatter of as many takes the same."""
        if gpus == 1:
            return 0.0
        return self.base + (gpus - 1) / gpus * length / self.speed(gpus) + self.steps(gpus)


def buckets(length: int) -> list[int]:
    """Bytes of DDP's buckets, in the order in which they are reduced."""
    rest = max(0, length - FIRST_BUCKET)
    full, last = divmod(rest, BUCKET)
    return [min(length, FIRST_BUCKET)] + [BUCKET] * full + [last] * (last > 0)


def compute(model: Model) -> float:
    return model.batch / model.samples_per_second


def exposed_ddp(model: Model, cluster: Cluster, gpus: int) -> float:
    """Seconds after the backward pass until the last bucket is reduced."""
    length, backward = FLOAT * model.parameters, BACKWARD * compute(model)
    done = came = 0.0
    for bucket in buckets(length):
        came += bucket
        done = max(done, backward * came / length) + cluster.all_reduce(bucket, gpus)
    return done - backward


def exposed_fsdp(model: Model, cluster: Cluster, gpus: int) -> float:
    """Seconds of communication that both passes wait for: the first unit's gather (in the backward
    pass also the last one's reduce-scatter), or the time by which all communication of the pass is
    longer than its computing, whichever is more."""
    unit = cluster.all_gather(FLOAT * model.parameters / model.units, gpus)
    forward, backward = (1 - BACKWARD) * compute(model), BACKWARD * compute(model)
    return max(unit, model.units * unit - forward) + max(
        2 * unit, 2 * model.units * unit - backward
    )


def waited_for(model: Model, cluster: Cluster, gpus: int, fsdp: bool = False) -> float:
    """Seconds of a step's small collectives: loss and statistics; the gradient's norm."""
    length = 8 * (1 + model.statistics)
    return cluster.all_reduce(length, gpus) + (cluster.all_reduce(FLOAT, gpus) if fsdp else 0.0)


def ngd(model: Model, cluster: Cluster, gpus: int) -> float:
    """Seconds of NGD in a step, on average over a period of updates."""
    share = max(model.update / gpus, model.largest_update) if gpus > 1 else model.update
    update = (share + EVERYBODY * model.update) / cluster.products
    given = max(model.fisher / gpus, model.largest_fisher)
    update += cluster.all_gather(FLOAT * given * gpus, gpus)
    return model.precondition / cluster.products + update / UPDATE_PERIOD


def step(model: Model, cluster: Cluster, gpus: int, kind: str) -> float:
    """Seconds. `kind`: "ddp", "ddp, ngd" or "fsdp"."""
    fsdp = kind == "fsdp"
    exposed = (exposed_fsdp if fsdp else exposed_ddp)(model, cluster, gpus)
    seconds = compute(model) + exposed + waited_for(model, cluster, gpus, fsdp)
    return seconds + (ngd(model, cluster, gpus) if kind == "ddp, ngd" else 0.0)


KINDS = ("ddp", "ddp, ngd", "fsdp")
LINKS = 0.8  # of a link's speed is assumed to arrive
# NVIDIA DGX A100: NVLink 600 GB/s per GPU, both ways together; eight InfiniBand cards of 200 Gb/s.
CLUSTERS = (
    Cluster("InfiniBand, 8 x 200 Gb/s a node", LINKS * 300e9, LINKS * 8 * 25e9),
    Cluster("Ethernet, 100 Gb/s a node", LINKS * 300e9, LINKS * 12.5e9),
)
MODELS = (
    # 2,470 pictures/s of 224x224 in mixed precision on one A100 80GB: NVIDIA/DeepLearningExamples,
    # PyTorch/Classification/ConvNets/resnet50v1.5/README.md.
    Model(
        "ResNet-50", 25_557_032, units=17, batch=256, samples_per_second=2470.0, statistics=53_120,
        precondition=8_141_652_160, update=28_161_605_744, largest_update=664_567_808,
        fisher=4_659_888, largest_fisher=170_241,
    ),
    # ViT-g/14: 693 pictures/s on eight A100 (NeMo's user guide, Vision Transformer, Performance) of
    # 3 x 533.1 GFLOP each (Zhai et al. 2022, arXiv:2106.04560, table 2): 44 % of 312 TFLOP/s.
    # ViT-B/16 of 35.1 GFLOP forward at the same speed; small models may reach less.
    Model(
        "ViT-B/16", 86_567_656, units=13, batch=128, samples_per_second=693 / 8 * 533.1 / 35.1,
        statistics=0, precondition=27_588_280_320, update=55_921_303_600,
        largest_update=822_902_784, fisher=12_723_458, largest_fisher=252_161,
    ),
)  # fmt: skip


def table(model: Model) -> list[str]:
    """Rows in Markdown: milliseconds, and the share of ideal scaling."""
    columns = [(cluster, kind) for cluster in CLUSTERS for kind in KINDS]
    heads = [f"{kind}; {cluster.name.split(',')[0]}" for cluster, kind in columns]
    rows = [f"| GPUs | {' | '.join(heads)} |", "| ---: " * (len(heads) + 1) + "|"]
    for gpus in SIZES:
        cells = [f"{gpus}"]
        for cluster, kind in columns:
            seconds = step(model, cluster, gpus, kind)
            ideal = step(model, cluster, 1, kind) / seconds
            cells.append(f"{1e3 * seconds:.0f} ({ideal:.0%})")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def draw(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for model, axes in zip(MODELS, figure.subplots(1, len(MODELS)), strict=True):
        for cluster, line in zip(CLUSTERS, ("-", "--"), strict=True):
            for kind, color in zip(KINDS, ("C0", "C1", "C2"), strict=True):
                shares = [
                    100 * step(model, cluster, 1, kind) / step(model, cluster, gpus, kind)
                    for gpus in SIZES
                ]
                label = f"{kind}; {cluster.name.split(',')[0]}"
                axes.plot(SIZES, shares, line, color=color, marker=".", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, map(str, SIZES))
        axes.set(title=model.name, xlabel="GPUs", ylabel="% of ideal scaling", ylim=(0, 105))
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--plot", type=Path, help="draws the shares of ideal scaling")
    options = flags.parse_args()
    for model in MODELS:
        print(
            f"{model.name}: batches of {model.batch} per GPU, computing alone "
            f"{1e3 * compute(model):.1f} ms, with NGD on one GPU "
            f"{1e3 * step(model, CLUSTERS[0], 1, 'ddp, ngd'):.1f} ms"
        )
        print("\nms per step (of ideal scaling)\n")
        print("\n".join(table(model)), end="\n\n")
    if options.plot:
        draw(options.plot)


if __name__ == "__main__":
    main()
