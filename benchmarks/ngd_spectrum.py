#!/usr/bin/env python3
"""Draws what natural gradient does to gradients: their spectrum before and after.

    python benchmarks/ngd_spectrum.py --output spectrum.png

A ResNet-18 of width 8 trains on the built-in pictures with NGD. Then, with the weights held, the
gradients of one convolution over many batches are taken, raw and preconditioned by the Fisher
matrices that the training has learned, with several values of alpha. The picture shows the
eigenvalues of the scatter of both along the output and the input channels.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from utils.data.images.image_data import PictureRequest
from utils.data.images.loader import ImageLoader
from utils.data.images.shapes import load_shapes
from utils.models.resnet import ResNet
from utils.optim.ngd.optimizer import NGD

LAYER = "layer3.1.conv1.weight"
ALPHAS = (0.5, 4.0, 32.0)
BATCHES = 60


def scatter(gradients: list[Tensor], axis: int) -> Tensor:
    """Eigenvalues of the mean scatter along `axis`, largest first; their sum is 1."""
    rows = torch.cat([g.movedim(axis, -1).reshape(-1, g.shape[axis]) for g in gradients]).double()
    values = torch.linalg.eigvalsh(rows.T @ rows).flip(0)
    return values / values.sum()


def natural(gradient: Tensor, state: dict, alpha: float) -> Tensor:
    for axis, length in enumerate(gradient.shape):
        r, spectrum, rest = (state[f"{name}_{axis}"] for name in ("basis", "spectrum", "rest"))
        eye = torch.eye(length)
        f = r.T @ spectrum @ r + rest * (eye - r.T @ r)
        g = f + alpha / length * f.trace() * eye
        turned = torch.linalg.solve(g, gradient.movedim(axis, 0).flatten(1))  # G^-1 X'
        turned = turned * gradient.norm() / turned.norm()
        gradient = turned.view_as(gradient.movedim(axis, 0)).movedim(0, axis)
    return gradient


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output", type=Path, default=Path("spectrum.png"))
    flags.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    options = flags.parse_args()
    torch.manual_seed(0)
    data = load_shapes("shapes", PictureRequest(Path(), Path()))
    loader = ImageLoader(
        data.train.images, data.train.labels, mean=data.mean, std=data.std, batch_size=64,
        device=torch.device("cpu"), shuffle=True,
    )  # fmt: skip
    model = ResNet(18, len(data.classes), 8).to(memory_format=torch.channels_last)
    parameter = model.get_parameter(LAYER)
    optimizer = NGD(model.parameters(), lr=0.05, weight_decay=5e-4)
    kept, step, epoch = [], 0, 0
    while len(kept) < BATCHES:
        for batch in loader.epoch(epoch, 0):
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            if step < options.steps:
                optimizer.step()
            else:
                kept.append(parameter.grad.clone())
            optimizer.zero_grad()
            step += 1
            if len(kept) == BATCHES:
                break
        epoch += 1
    draw(kept, optimizer.state[parameter], options)


def draw(gradients: list[Tensor], state: dict, options) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (axis, name) in zip(panels, ((0, "output"), (1, "input")), strict=True):
        raw = scatter(gradients, axis)
        panel.plot(raw, color="black", label="gradients")
        print(f"{name} channels: largest / mean eigenvalue")
        print(f"  gradients {raw[0] * len(raw):.1f}")
        for colour, alpha in enumerate(ALPHAS):
            values = scatter([natural(g, state, alpha) for g in gradients], axis)
            panel.plot(values, color=f"C{colour}", label=f"natural, alpha {alpha:g}")
            print(f"  natural, alpha {alpha:g}: {values[0] * len(values):.1f}")
        panel.axhline(1 / len(raw), color="grey", ls=":", lw=1, label="white")
        panel.set_yscale("log")
        panel.set_xlabel(f"direction along the {name} channels")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the scatter")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"Scatter of the gradients of {LAYER} after {options.steps} steps", fontsize=10)
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
