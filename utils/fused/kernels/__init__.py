"""Triton kernels for the operations between matrix products, on NVIDIA GPUs; this file chooses
between them and PyTorch.

`images` and `layers` return the module of kernels for the given tensors, or None where PyTorch has
to compute: on another device, without Triton (which PyTorch's builds for CPUs, macOS and Windows
lack), for float64, and for memory layouts that the kernels do not support. Triton is imported when
it is first needed.

Each kernel reads bf16, fp16 or fp32, computes in float32 and rounds once. Grids and blocks depend
only on shapes, and sums are added in a fixed order: the same input gives the same bits.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

DEVICES = ("cuda",)  # the tests add "cpu", where Triton's interpreter runs the kernels
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST_ROW = 1 << 14  # elements; a program holds a whole row


@functools.cache
def unusable() -> str | None:
    """Why the kernels cannot be used on this GPU, for the log; None if they can. Compiles and runs
    one to find out."""
    if torch.version.hip is not None:
        return "they were made for NVIDIA GPUs"
    try:
        from . import image_kernels
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        image_kernels.try_out(DEVICES[-1])
    except Exception as error:  # no C compiler, an unsupported GPU, ...
        return f"Triton: {str(error).strip().splitlines()[0]}"
    return None


def images(*tensors: Tensor) -> ModuleType | None:
    """Kernels for (n, channels, height, width) tensors, all in channels_last."""
    last = torch.channels_last
    if not _supported(tensors) or not all(t.is_contiguous(memory_format=last) for t in tensors):
        return None
    from . import image_kernels

    return image_kernels


def layers(*tensors: Tensor) -> ModuleType | None:
    """Kernels for contiguous tensors (..., width)."""
    in_rows = all(t.is_contiguous() and t.shape[-1] <= LONGEST_ROW for t in tensors)
    if not _supported(tensors) or not in_rows:
        return None
    from . import layer_kernels

    return layer_kernels


def ceil_div(a: int, b: int) -> int:
    """Like triton.cdiv, which takes microseconds when called outside a kernel."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`. See ceil_div for why not Triton's."""
    return 1 << (number - 1).bit_length()


def _supported(tensors: tuple[Tensor, ...]) -> bool:
    supported = all(t.device.type in DEVICES and t.dtype in DTYPES and t.numel() for t in tensors)
    return supported and unusable() is None
