"""How PyTorch works in this process: cuDNN's plans, and the precision of float32; and whether
bfloat16 is faster here.

cuDNN makes an execution plan for each new shape and caches it. Convolutions (`search_plans`,
`trial_plans`): benchmarking all plans of a shape takes seconds and finds a faster one than cuDNN's
heuristics. This pays off for training's full micro-batches, but not for an epoch's smaller last
one, for evaluation, or for the sizes that --auto_batch tries. Attention (`prefer_flash_attention`):
cuDNN's needs a plan for every new sequence length, and making it takes longer than the attention
itself. FlashAttention needs none.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

X86 = ("x86_64", "AMD64")  # by `platform.machine`


def search_plans(wanted: bool) -> None:
    """Sets whether convolutions of a new shape, backward passes included, benchmark all plans from
    now on. Shapes that already have a plan keep it, even one from cuDNN's heuristics."""
    torch.backends.cudnn.benchmark = wanted


@contextlib.contextmanager
def trial_plans() -> Iterator[None]:
    """A context in which convolutions use the plans of cuDNN's heuristics, without leaving them in
    the cache for training: PyTorch caches plans of deterministic convolutions separately."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def prefer_flash_attention() -> None:
    """Disables cuDNN's attention for `scaled_dot_product_attention`."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def float32_products(kind: str):
    """A context that sets the precision of float32 matrix products and convolutions: full, or with
    inputs rounded first.

    The settings are process-wide, so they also hold for autograd's threads, which run the backward
    pass on a GPU, if it is called within the context. Changing them needs no synchronization: they
    choose the kernel at launch.

    Args:
        kind: "float32": full precision. "fast": inputs are rounded to TF32 on a GPU, to bfloat16 on
            a CPU with bfloat16 instructions, and accumulated in float32; other CPUs use full
            precision.
    """
    gpu, cpu = ("tf32", "bf16") if kind == "fast" else ("ieee", "ieee")
    wanted = {
        torch.backends.cuda.matmul: gpu,
        torch.backends.cudnn.conv: gpu,
        torch.backends.mkldnn.matmul: cpu,
        torch.backends.mkldnn.conv: cpu,
    }
    # Not by `allow_tf32`: PyTorch raises on reading the old setting once the new one differs.
    before = {backend: backend.fp32_precision for backend in wanted}
    try:
        for backend, precision in wanted.items():
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in before.items():
            backend.fp32_precision = precision


def is_faster_in_bf16(device: torch.device) -> bool:
    """Whether the device's instructions for bf16 are faster than those for float32. With
    AVX512-BF16 but no AMX, an Intel Xeon's convolutions ran at 0.7 of the speed of float32; with
    AMD's AVX512-BF16 a ResNet trains about twice as fast (benchmarks/results/recipes.md)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in X86:
        amds = torch.cpu._is_avx512_bf16_supported() and _is_amd()
        return amds or torch.cpu._is_amx_tile_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        return "AuthenticAMD" in platform.processor()
