#!/usr/bin/env python3
"""Hours, memory and speed of the ViTs on ImageNet, by arithmetic; nothing here ran on a GPU.

    python benchmarks/vit_on_paper.py

The run is that of recipes/vit_b32_imagenet.yaml: 300 epochs of 39 steps of 32,768 pictures, in
micro-batches of 256, whose gradients are reduced once in a step. Communication is that of
scaling_on_paper.py; FLOPs are counted by PyTorch for one picture on the CPU, and the bytes that
autograd keeps for the backward pass are counted there in bfloat16.

Assumed: an H100 computes at 40 % of its 989 TFLOP/s (dense bfloat16), a backward pass takes twice
the forward pass; weights, gradients and LAMB's two moments are float32; nobody waits for pictures.
"""

import dataclasses
import sys
from pathlib import Path

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.scaling_on_paper import CLUSTERS, FLOAT, Model, compute, exposed_ddp, waited_for
from benchmarks.studies import markdown

NAMES = ("vit_base_patch32_224", "vit_base_patch16_224", "vit_large_patch32_224")
GPUS = (4, 8, 64)
PEAK, UTILISATION = 989e12, 0.4  # FLOP/s of an H100, and the part of them that is reached
STEPS, GLOBAL, BATCH = 300 * 39, 32_768, 256
STATES = 4  # weights, gradients and two moments
GIB = 2**30


def vit(name: str) -> torch.nn.Module:
    return timm.create_model(name, num_classes=1000, pos_drop_rate=0.1, proj_drop_rate=0.1)


def forward_flop(model: torch.nn.Module) -> float:
    """For one picture."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 224, 224))
    return float(counter.get_total_flops())


def kept_bytes(model: torch.nn.Module) -> float:
    """What autograd keeps of one picture for the backward pass, in bfloat16: what four pictures
    take more than two."""
    return (_kept(model, 4) - _kept(model, 2)) / 2


def _kept(model: torch.nn.Module, pictures: int) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # each memory once, and held, so that no other takes it
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        model(torch.zeros(pictures, 3, 224, 224))
    return sum(storage.nbytes() for storage in kept.values())


def on_paper(name: str) -> list[list[str]]:
    """A row for each number of GPUs."""
    model = vit(name)
    flop, kept = forward_flop(model), kept_bytes(model)
    parameters = sum(p.numel() for p in model.parameters())
    speed = UTILISATION * PEAK / (3 * flop)  # pictures/s of a GPU
    one = Model(
        name, parameters, units=1, batch=BATCH, samples_per_second=speed, statistics=0,
        precondition=0, update=0, largest_update=0, fisher=0, largest_fisher=0,
    )  # fmt: skip
    memory = (STATES * FLOAT * parameters + BATCH * kept) / GIB
    rows = []
    for gpus in GPUS:
        cells = []
        for cluster in CLUSTERS:
            cluster = dataclasses.replace(cluster, node=min(8, gpus))
            micro_batches = GLOBAL // (BATCH * gpus)
            seconds = micro_batches * compute(one)
            seconds += exposed_ddp(one, cluster, gpus) + waited_for(one, cluster, gpus)
            cells.append(f"{STEPS * seconds / 3600:.1f} h, {GLOBAL / seconds:,.0f} pictures/s")
        rows.append([name, f"{flop / 1e9:.1f}", f"{memory:.0f}", str(gpus), *cells])
    return rows


def main() -> None:
    heads = [cluster.name.split(",")[0] for cluster in CLUSTERS]
    head = ["model", "forward GFLOP", "GiB a GPU", "GPUs", *heads]
    print(markdown(head, [row for name in NAMES for row in on_paper(name)], left=1))


if __name__ == "__main__":
    main()
