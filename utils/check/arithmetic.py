"""Whether this machine computes right, and how fast: the fused modules give what the plain ones do,
several processes what one does, and no rank is slow."""

import copy
import hashlib
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed.strategies.base import build_strategy
from ..exchange import Exchange
from ..fused import kernels
from ..fused.batch_norm import normalization
from ..fused.cross_entropy import fused_cross_entropy
from ..fused.transformer import feed_forward
from ..training.objective import mixed_cross_entropy

# Of the largest value, in float32: far more than rounding, far less than a mistake.
ALLOWED = 1e-4
# The small network: samples of each rank, what is allowed of the largest parameter, in float64.
SAMPLES, ALLOWED_IN_FLOAT64 = 4, 1e-10
LR, MOMENTUM, STEPS = 0.1, 0.9, 2
# Of matrix products: how long they are measured, rows and columns.
SECONDS, SIZE = 0.5, {"cuda": 4096, "cpu": 512}


# ---- fused modules ----------------------------------------------------------------------------


def largest_differences(device: torch.device) -> dict[str, float]:
    """{fused module: largest difference from the plain one in float64, relative to the largest
    value}, of results and gradients."""
    comparisons = {
        "cross-entropy": _cross_entropy,
        "feed-forward block": _feed_forward,
        "BatchNorm": _batch_norm,
    }
    return {name: compare(device) for name, compare in comparisons.items()}


def how_computed(device: torch.device) -> str:
    """What the fused modules compute with on this device."""
    if device.type != "cuda":
        return "by PyTorch's operations, as the kernels are for NVIDIA GPUs"
    reason = kernels.unusable()
    return "by Triton's kernels" if reason is None else f"without kernels: {reason}"


def _difference(fused: Callable, plain: Callable, inputs: list[Tensor]) -> float:
    """Of results, and of the gradients of all inputs; fused in float32, plain in float64."""
    found = []
    for function, dtype in ((fused, torch.float32), (plain, torch.float64)):
        tensors = [t.detach().to(dtype).requires_grad_() for t in inputs]
        result = function(*tensors)
        weights = torch.linspace(-1, 1, result.numel(), device=result.device, dtype=dtype)
        gradients = torch.autograd.grad((result.flatten() * weights).sum(), tensors)
        found.append([result.detach(), *gradients])
    pairs = zip(*found, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def _randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _cross_entropy(device: torch.device) -> float:
    targets = torch.arange(64, device=device) % 10
    lam = torch.linspace(0, 1, 64, device=device)

    def loss(function: Callable, logits: Tensor) -> Tensor:
        return function(logits, targets, targets.flip(0), lam.to(logits.dtype), 0.1)

    return _difference(
        lambda logits: loss(fused_cross_entropy, logits),
        lambda logits: loss(mixed_cross_entropy, logits),
        [_randn(device, 64, 10)],
    )


def _feed_forward(device: torch.device) -> float:
    """z + W2 gelu(W1 LayerNorm(z)), z = x + branch."""
    shapes = ((48, 32), (48, 32), (32,), (32,), (128, 32), (128,), (32, 128), (32,))

    def fused(x, branch, weight, bias, weight1, bias1, weight2, bias2):
        layer = SimpleNamespace(weight=weight, bias=bias, eps=1e-5)
        fc1 = SimpleNamespace(weight=weight1, bias=bias1)
        fc2 = SimpleNamespace(weight=weight2, bias=bias2)
        return feed_forward(x, branch, layer, fc1, fc2, 0.0, "speed")

    def plain(x, branch, weight, bias, weight1, bias1, weight2, bias2):
        z = x + branch
        hidden = F.gelu(F.linear(F.layer_norm(z, (32,), weight, bias), weight1, bias1))
        return z + F.linear(hidden, weight2, bias2)

    return _difference(fused, plain, [_randn(device, *shape) for shape in shapes])


def _batch_norm(device: torch.device) -> float:
    """Scale and shift from the statistics of a batch; they have no gradient of their own."""
    c = _randn(device, 8, 16, 6, 6).to(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(16).to(device)
    with torch.no_grad():
        _, scale, shift = normalization(norm, c)
        found = c * scale[:, None, None] + shift[:, None, None]
        exact = F.batch_norm(c.double(), None, None, training=True, eps=norm.eps)
    return float((found.double() - exact).abs().max() / exact.abs().max())


# ---- several processes ------------------------------------------------------------------------


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


# ---- speed ------------------------------------------------------------------------------------


def matrix_speed(device: torch.device) -> float:
    """Operations per second of matrix products: on a GPU in bfloat16, on a CPU in float32."""
    size = SIZE[device.type]
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    for _ in range(3):
        a @ a
    wait()
    calls, start, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < SECONDS:
        for _ in range(10):
            a @ a
        wait()
        calls, elapsed = calls + 10, time.perf_counter() - start
    return calls * 2 * size**3 / elapsed


def slowest(speeds: list[float]) -> tuple[int, float]:
    """(rank, its speed relative to the median of all)."""
    rank = min(range(len(speeds)), key=speeds.__getitem__)
    return rank, speeds[rank] / sorted(speeds)[len(speeds) // 2]
