"""Whether several processes compute what one does: a training step of a small network."""

import copy
import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.distributed.strategies.base import build_strategy
from utils.exchange import Exchange

SAMPLES = 4  # of each rank
ALLOWED = 1e-10  # of the largest parameter, in float64
LR, MOMENTUM, STEPS = 0.1, 0.9, 2


def small_network() -> nn.Module:
    """In float64, without BatchNorm: its statistics are those of a rank's own samples."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, 2), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 3 * 3, 5)).double()


def difference_from_one(exchange: Exchange, device: torch.device) -> tuple[float, list[int]]:
    """Trains the small network with all ranks together, by DDP, and on each rank alone with the
    samples of all.

    Returns:
        (largest difference of a parameter, relative to the largest parameter, over all ranks; the
        ranks whose parameters have other bits than those of rank 0).
    """
    generator = torch.Generator().manual_seed(1)
    count = SAMPLES * exchange.size
    pictures = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64).to(device)
    targets = torch.randint(5, (count,), generator=generator).to(device)
    network = small_network()
    alone, together = copy.deepcopy(network).to(device), network.to(device)
    called = build_strategy("ddp", together, exchange).called
    own = slice(SAMPLES * exchange.rank, SAMPLES * (exchange.rank + 1))
    _train(alone, alone, pictures, targets)
    _train(together, called, pictures[own], targets[own])
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    with torch.no_grad():
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        largest = max(float(p.abs().max()) for p in alone.parameters())
    digest = hashlib.sha256()
    for parameter in together.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    told = exchange.gather_json([difference / largest, digest.hexdigest()])
    others = [rank for rank, (_, bits) in enumerate(told) if bits != told[0][1]]
    return max(difference for difference, _ in told), others


def _train(model: nn.Module, called: nn.Module, pictures: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(called(pictures), targets).backward()
        optimizer.step()
