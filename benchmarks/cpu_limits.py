#!/usr/bin/env python3
"""How near a small network comes to what a CPU can compute, and what would bring it nearer.

    python benchmarks/cpu_limits.py --threads 1

The network of recipes/cifar10_10min_cpu.yaml without its data: matrix products and each of its 3x3
convolutions in float32 and bfloat16; forward and backward in two memory orders and compiled; the
forward pass in evaluation, also compiled and with BatchNorm folded into the convolutions. They take
turns. Compiling takes some minutes.
"""

import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from utils.machine.host_memory import keep_freed_memory
from utils.models.airbench import AirbenchNet

WIDTH, BATCH, SIDE = 48, 500, 2048
DTYPES = (torch.float32, torch.bfloat16)
LAYERS = {  # inputs, outputs, side of the pictures
    "1.1": (24, WIDTH, 31), "1.2": (WIDTH, WIDTH, 15), "2.1": (WIDTH, 4 * WIDTH, 15),
    "2.2": (4 * WIDTH, 4 * WIDTH, 7), "3.2": (4 * WIDTH, 4 * WIDTH, 3),
}  # fmt: skip


def rate(work: float, run: Callable) -> float:
    """`work` per second of one call."""
    started = time.perf_counter()
    run()
    return work / (time.perf_counter() - started)


def product(dtype: torch.dtype) -> Callable[[], float]:
    """() -> GFLOP/s"""
    x = torch.randn(SIDE, SIDE).to(dtype)
    return lambda: rate(2e-9 * SIDE**3, lambda: x @ x)


def convolution(inputs: int, outputs: int, side: int, dtype: torch.dtype) -> Callable[[], float]:
    """() -> GFLOP/s, forward and backward"""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False).to(dtype)
    x = torch.randn(BATCH, inputs, side, side).to(dtype, memory_format=torch.channels_last)
    gradient = torch.randn_like(conv(x.requires_grad_()))
    work = 3 * 2e-9 * 9 * inputs * outputs * side**2 * BATCH
    return lambda: rate(work, lambda: conv(x).backward(gradient))


def training(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], float]:
    """() -> pictures per second"""
    return lambda: rate(
        BATCH, lambda: F.cross_entropy(model(inputs), targets, label_smoothing=0.2).backward()
    )


def evaluation(model: nn.Module, inputs: Tensor) -> Callable[[], float]:
    """() -> pictures per second"""
    return torch.no_grad()(lambda: rate(BATCH, partial(model, inputs)))


def folded(model: AirbenchNet) -> AirbenchNet:
    """For evaluation. Without a scale BatchNorm keeps the order of numbers, so that the pooling
    between a convolution and its BatchNorm makes no difference."""
    model = copy.deepcopy(model)
    for group in model.groups:
        for conv, norm in (("conv1", "norm1"), ("conv2", "norm2")):
            setattr(group, conv, fuse_conv_bn_eval(getattr(group, conv), getattr(group, norm)))
            setattr(group, norm, nn.Identity())
    return model


def share_of_convolutions(step: Callable) -> float:
    with torch.profiler.profile() as profile:
        step()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    own = sum(value for name, value in times.items() if "convolution" in name)
    return own / sum(times.values())


def main() -> None:
    options = parser(__doc__, repetitions=5, threads=1).parse_args()
    keep_freed_memory()  # as the entry scripts do
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    last = torch.channels_last
    x = torch.randn(BATCH, 3, 32, 32)
    targets = torch.randint(0, 10, (BATCH,))
    plain = AirbenchNet(10, WIDTH)
    plain.stem.fit(x[:100])
    model, inputs = copy.deepcopy(plain).to(memory_format=last), x.contiguous(memory_format=last)
    compiled = {
        name: torch.compile(copy.deepcopy(model), mode=mode)
        for name, mode in (("compiled", "default"), ("max-autotune", "max-autotune"))
    }
    flops = {f"product {str(dtype)[6:]}": product(dtype) for dtype in DTYPES}
    for layer, sizes in LAYERS.items():
        flops |= {f"{layer} {str(dtype)[6:]}": convolution(*sizes, dtype) for dtype in DTYPES}
    trained = {
        "channels last": training(model, inputs, targets),
        "usual": training(plain, x, targets),
    }
    trained |= {name: training(each, inputs, targets) for name, each in compiled.items()}
    results = {}
    figures = side_by_side(flops, options.repetitions)
    pairs = [(f"{each} bfloat16", f"{each} float32") for each in ("product", *LAYERS)]
    results["products and convolutions"] = {
        "gflop_per_second": figures, "ratios": ratios(figures, *pairs)
    }  # fmt: skip
    figures = side_by_side(trained, options.repetitions)
    pairs = [(name, "channels last") for name in trained if name != "channels last"]
    results["training"] = {"samples_per_second": figures, "ratios": ratios(figures, *pairs)}
    share = share_of_convolutions(trained["channels last"])

    for each in (model, *compiled.values()):
        each.eval()
    assert torch.allclose(folded(model)(inputs), model(inputs), atol=1e-4)
    evaluated = {"plain": evaluation(model, inputs), "folded": evaluation(folded(model), inputs)}
    evaluated |= {name: evaluation(each, inputs) for name, each in compiled.items()}
    figures = side_by_side(evaluated, options.repetitions)
    pairs = [(name, "plain") for name in evaluated if name != "plain"]
    results["evaluation"] = {"samples_per_second": figures, "ratios": ratios(figures, *pairs)}
    report("What a CPU can compute", results, options.json, share_of_convolutions=f"{share:.2f}")


if __name__ == "__main__":
    main()
