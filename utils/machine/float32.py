"""How a GPU or a CPU multiplies float32 numbers: in full, or rounded to fewer bits first."""

import contextlib

import torch


@contextlib.contextmanager
def float32_products(kind: str):
    """Within it, products of float32 matrices and convolutions are computed as `kind` says.

    The settings are those of the process, so they also hold for the threads in which autograd runs
    the backward pass on a GPU, as long as it is called within. To change them waits for nothing:
    the host chooses the kernel by them when it launches it.

    Args:
        kind: "float32": in full. "fast": of factors rounded to TF32 on a GPU, to bfloat16 on a CPU
            that multiplies these, added up in float32; other CPUs go on in full.
    """
    gpu, cpu = ("tf32", "bf16") if kind == "fast" else ("ieee", "ieee")
    wanted = {
        torch.backends.cuda.matmul: gpu,
        torch.backends.cudnn.conv: gpu,
        torch.backends.mkldnn.matmul: cpu,
        torch.backends.mkldnn.conv: cpu,
    }
    # Never by `allow_tf32`: PyTorch refuses to read the older setting once the newer one differs.
    before = {backend: backend.fp32_precision for backend in wanted}
    try:
        for backend, precision in wanted.items():
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in before.items():
            backend.fp32_precision = precision
