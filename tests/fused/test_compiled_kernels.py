"""Compiles every Triton kernel for GPUs that this machine may not have.

Models take training steps on fake tensors, which have shapes but no values. Each launch is recorded
instead of run, then compiled for what Triton derives from its arguments: dtypes, constants, which
pointers and sizes are multiples of 16, and which arguments are None. New kernels and launches are
thus covered without a change here.
"""

import contextlib
import importlib
import inspect
import io
import multiprocessing
import os
import pkgutil
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils.fused import fuse, kernels
from utils.fused.cross_entropy import fused_cross_entropy
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer

GPUS = {80: 3, 90: 1, 100: 3}  # compute capability, times ten: A100, H100, B200
# The variants are compiled for an H100; for the others, whose compilers differ little, every third
# one, and all in `make soak`.
if "SOAK" in os.environ:
    GPUS = dict.fromkeys(GPUS, 1)
# Of a program's threads together. A multiprocessor has 65,536 registers, and sums over rows have
# about four programs for each: all run at once.
MOST_REGISTERS = 65_536 // 4
# Bytes per thread, stores and loads. ptxas spills up to four values where that lets one more
# program run at once; compared with a thread's traffic for a tile that is little.
MOST_SPILLED = 32
# Between programs, memory is ordered by an atomic operation of one thread with barriers around it.
ORDERED = re.compile(
    r"bar\.sync(?:(?!\.global).)*?atom\.global\.gpu\.acq_rel(?:(?!\.global).)*?bar\.sync", re.DOTALL
)
LOOPS = ("_moments", "_gradient_sums", "_norm_backward")  # kernels whose programs take many tiles
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor. PyTorch's allocator aligns each to a multiple of 512 bytes."""

    dtype: torch.dtype
    offset: int  # in bytes

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True)
class Variant:
    """A kernel and the arguments of its compilation."""

    module: str
    kernel: str
    signature: dict
    constants: dict
    attributes: dict
    options: dict


# ---- which variants the models launch -----------------------------------------------------------


def pictures(n: int, dtype: torch.dtype, depth=50, size=32, mode="speed", affine=True, **options):
    model = fuse(ResNet(depth, 10, **options), mode)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not affine:
            module.weight = module.bias = None
    train(model, torch.randn(n, 3, size, size).to(memory_format=torch.channels_last), dtype)


def texts(n: int, length: int, dtype: torch.dtype, dim: int, **options):
    """Two layers; the last computes only each text's first token."""
    sizes = {"layers": 2, "dim": dim, "heads": dim // 64, "ffn": 2 * dim}
    model = fuse(Transformer(1000, 4, **sizes, **options), "speed")
    train(model, torch.randint(1, 1000, (n, length)), dtype)


def train(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype, enabled=dtype != FP32):
        y = model(x)
    y.sum().backward()


def loss(n: int, classes: int, dtype: torch.dtype) -> None:
    logits = torch.randn(n, classes, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, classes, (2, n))
    fused_cross_entropy(logits, *targets, torch.rand(n), 0.1).sum().backward()


def training_steps() -> None:
    """With realistic sizes. Steps that differ only in size mostly share their variants."""
    for depth in (50, 18):
        for n in (1024, 128):
            pictures(n, BF16, depth)
    pictures(128, BF16, mode="memory")
    pictures(128, BF16, affine=False)
    pictures(128, BF16, drop_path=0.1)
    pictures(125, BF16, size=224, stem="imagenet")  # rows not a multiple of 16
    for dim in (128, 512, 768):
        texts(64, 50, BF16, dim)
        texts(63, 51, BF16, dim)
    texts(64, 50, BF16, 512, dropout=0.0)
    for dtype in (FP32, FP16):
        pictures(128, dtype)
        texts(63, 51, dtype, 512)
    for classes in (4, 10, 1000):
        for dtype in (BF16, FP16, FP32):
            loss(1024, classes, dtype)


@pytest.fixture(scope="module")
def variants() -> list[Variant]:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    from utils.fused.kernels import image_kernels

    backend, found = make_backend(GPUTarget("cuda", next(iter(GPUS)), 32)), {}

    def record(kernel, *arguments, grid, warmup, **options):
        pointers = (
            Pointer(a.dtype, a.storage_offset() * a.itemsize) if isinstance(a, torch.Tensor) else a
            for a in arguments
        )
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, kinds, options = binder(*pointers, **options)
        variant = Variant(
            kernel.__module__, kernel.__name__,
            *kernel._pack_args(backend, options, bound, kinds, options)[1:], options,
        )  # fmt: skip
        found[repr(variant)] = variant

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(jit.JITFunction, "run", record)
        patch.setattr(kernels, "DEVICES", ("cpu",))
        patch.setattr(kernels, "unusable", lambda: None)
        patch.setattr(nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # reads values
        patch.setattr(image_kernels, "_arrivals", image_kernels._arrivals.__wrapped__)
        image_kernels.try_out("cpu")
        training_steps()
    return list(found.values())


# ---- resources of the compiled kernels ----------------------------------------------------------


def compiled(variant: Variant, capability: int) -> dict:
    """Spilled bytes per thread, registers and shared memory per program, and whether tiles are
    loaded ahead. Runs in a worker."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    source = ASTSource(kernel, variant.signature, variant.constants, variant.attributes)
    triton.knobs.nvidia.dump_ptxas_log = True  # to stdout
    with contextlib.redirect_stdout(io.StringIO()) as log:
        target = GPUTarget("cuda", capability, 32)
        program = triton.compile(source, target=target, options=variant.options)
    said, ptx = log.getvalue(), program.asm["ptx"]
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert len(spilled) == 2, said
    return {
        "registers": int(registers) * 32 * program.metadata.num_warps,
        "spilled": sum(map(int, spilled)),
        "shared": program.metadata.shared,
        "loads ahead": "cp.async" in ptx,
        "ordered": "atom." not in ptx or ORDERED.search(ptx) is not None,
    }


# Shared memory per program, in bytes: tiles that are loaded ahead lie there. The A100 has the
# least, 164 KB per multiprocessor, and reserves 1 KB for each program. With three programs at once,
# each with 8 KB on the way or more, a multiprocessor has the 25 KB in flight that keep an H200's
# memory busy (4.2 TB/s, a latency of 0.8 us, 132 multiprocessors).
MOST_SHARED = (164 << 10) // 3 - 1024


def test_every_kernel_is_launched(variants):
    from triton.runtime.jit import JITFunction

    for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        there = {n for n, _ in inspect.getmembers(module, lambda m: isinstance(m, JITFunction))}
        text = inspect.getsource(module)
        called = {n for n in there if len(re.findall(rf"\b{n}\(", text)) > 1}  # by kernels
        assert there - called == {v.kernel for v in variants if v.module == found.name}


def test_kernels_compile_within_resource_limits(variants, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    excess = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            (gpu, variant, pool.submit(compiled, variant, gpu))
            for gpu, every in GPUS.items()
            for variant in variants[::every]
        ]
        for gpu, variant, job in jobs:
            used = job.result()
            if (
                used["registers"] > MOST_REGISTERS
                or used["spilled"] > MOST_SPILLED
                or used["shared"] > MOST_SHARED
                or used["loads ahead"] != (variant.kernel in LOOPS)
                or not used["ordered"]
            ):
                excess.append((gpu, used, variant))
    assert not excess
