"""Precision of float32 matrix products and convolutions: full, or with inputs rounded first."""

import contextlib

import torch


@contextlib.contextmanager
def float32_products(kind: str):
    """A context that sets the precision of float32 matrix products and convolutions.

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
