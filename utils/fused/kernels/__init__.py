"""Triton kernels for what stands between the products, on NVIDIA GPUs; one place that decides
between them and PyTorch's code.

`images`, `layers` and `loss` return the module of kernels for the given tensors, or None where
PyTorch's code is to be used: on another device, without Triton (which PyTorch for CPUs, macOS and
Windows leaves out), for float64 and for a memory layout that a kernel does not know. Triton is
imported when a tensor first asks for it.

Each kernel reads bf16, fp16 or fp32, computes in float32 and rounds once. Grids and blocks follow
from the shapes alone, and sums are added in a fixed order: the same input gives the same bits.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

DEVICES = ("cuda",)  # the tests add "cpu", where Triton's interpreter runs the kernels
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST_ROW = 1 << 14  # that is held at once


@functools.cache
def unusable() -> str | None:
    """Why the kernels cannot be used on a GPU here, for the log; None: they can. Compiles and
    starts one."""
    if torch.version.hip is not None:
        return "they were made for NVIDIA GPUs"
    try:
        from utils.fused.kernels import image_kernels
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        image_kernels.try_out(DEVICES[-1])
    except Exception as error:  # of many kinds: no C compiler, an unknown GPU, ...
        return f"Triton: {str(error).strip().splitlines()[0]}"
    return None


def images(*tensors: Tensor) -> ModuleType | None:
    """For (n, channels, height, width), all in channels_last."""
    last = torch.channels_last
    if not _fit(tensors) or not all(t.is_contiguous(memory_format=last) for t in tensors):
        return None
    from utils.fused.kernels import image_kernels

    return image_kernels


def layers(*tensors: Tensor) -> ModuleType | None:
    """For rows (..., width), each tensor in one piece."""
    if not _fit(tensors) or not _in_rows(tensors):
        return None
    from utils.fused.kernels import layer_kernels

    return layer_kernels


def loss(logits: Tensor) -> ModuleType | None:
    """For logits (n, classes)."""
    if not _fit((logits,)) or not _in_rows((logits,)):
        return None
    from utils.fused.kernels import loss_kernels

    return loss_kernels


def ceil_div(a: int, b: int) -> int:
    """As triton.cdiv, which takes microseconds outside of a kernel."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """The smallest that is not less, as triton.next_power_of_2: see ceil_div."""
    return 1 << (number - 1).bit_length()


def _fit(tensors: tuple[Tensor, ...]) -> bool:
    fit = all(t.device.type in DEVICES and t.dtype in DTYPES and t.numel() for t in tensors)
    return fit and unusable() is None


def _in_rows(tensors: tuple[Tensor, ...]) -> bool:
    return all(t.is_contiguous() and t.shape[-1] <= LONGEST_ROW for t in tensors)
