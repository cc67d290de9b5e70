"""What a GPU's tensor cores do to float32 where TF32 is allowed, on a CPU."""

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}


@contextlib.contextmanager
def precision(value: str, *backends):
    """Sets these backends to `value`, as a user may have done."""
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = value
        yield
    finally:
        for backend, own in zip(backends, before, strict=True):
            backend.fp32_precision = own


def rounded(value):
    """Rounded to TF32's 10 fraction bits; anything but a float32 tensor is returned unchanged."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    return (value.view(torch.int32) + (1 << 12) & -(1 << 13)).view(torch.float32)


class EmulatedTF32(TorchDispatchMode):
    """Rounds the factors of products, forward and backward, wherever the settings of the process
    let a GPU do so at that moment. `used`: how often."""

    def __init__(self):
        super().__init__()
        self.used = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backend = None
        if func in CONVOLUTIONS:
            backend = torch.backends.cudnn.conv
        elif func in MATMULS:
            backend = torch.backends.cuda.matmul
        if backend is not None and backend.fp32_precision == "tf32":
            self.used += 1
            args = [rounded(value) for value in args]
        return func(*args, **(kwargs or {}))
