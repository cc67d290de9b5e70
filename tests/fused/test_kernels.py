"""The Triton kernels: that they are right, in Triton's interpreter, and that they compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils.fused import kernels

HERE = Path(__file__).parent
GPUS = [80, 90]  # compute capability, times ten


@pytest.mark.slow
def test_in_the_interpreter():
    """All of kernel_checks.py in one process: Triton asks once, when it is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "kernel_checks.py"]
    result = subprocess.run(
        command, cwd=HERE, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


@pytest.fixture
def nothing_known(monkeypatch):
    """Of whether the kernels can be used; CPUs are taken for GPUs."""
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    monkeypatch.delitem(sys.modules, "utils.fused.kernels.image_kernels", raising=False)
    monkeypatch.delattr(kernels, "image_kernels", raising=False)
    kernels.unusable.cache_clear()
    yield
    kernels.unusable.cache_clear()


def test_without_triton_pytorch_computes(nothing_known, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.images(torch.ones(2, 3, 1, 1)) is None and kernels.loss(torch.ones(2, 3)) is None
    assert "Triton cannot be imported" in kernels.unusable()


def test_where_triton_does_not_work_pytorch_computes(nothing_known):
    pytest.importorskip("triton")
    assert kernels.layers(torch.ones(2, 3)) is None
    assert kernels.unusable().startswith("Triton: ") and "\n" not in kernels.unusable()


def launches(monkeypatch) -> list[tuple]:
    """(kernel, arguments, options) of what would be started."""
    triton = pytest.importorskip("triton")
    found = []
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction,
        "run",
        lambda kernel, *arguments, grid, warmup, **options: found.append(
            (kernel, arguments, options)
        ),
    )
    return found


def compiled(kernel, arguments, options, capability: int):
    """As it is for a GPU of this compute capability, which need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {
        torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
        torch.int64: "*i64", torch.uint8: "*u8", int: "i32", float: "fp32",
    }  # fmt: skip
    signature, constants = {}, {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
            signature[parameter.name] = kinds[kind]
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_they_compile(dtype, monkeypatch, tmp_path):
    """Every kernel with every part of it, for GPUs that this machine may lack."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    started = launches(monkeypatch)
    from utils.fused.kernels import image_kernels, layer_kernels, loss_kernels

    c = torch.zeros(4, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
    channels = torch.ones(64)
    numbers = image_kernels.Numbers(*[channels] * 4)
    for more in ((), (c[:, :1, :1, :1], 0.9, c), (None, 1.0, c, channels, channels)):
        for relu in (True, False):
            image_kernels.affine(c, channels, channels, relu, *more, out=c)
    running = torch.zeros(2, 64)
    image_kernels.batch_numbers(c, channels, channels, 1e-5, *running, 0.1)
    image_kernels.batch_numbers(c, None, None, 1e-5, None, None, 0.0)
    for alone in (True, False):
        sums = image_kernels.gradient_sums(c, c, numbers, relu=alone)
        image_kernels.input_gradient(c, c, numbers, sums, relu=alone, out=c)
    image_kernels.gradient_sums(c, c, numbers, y=c, gated=c)

    x, branch = torch.zeros(6, 512), torch.zeros(6, 512, dtype=dtype)
    scale = torch.ones(512)
    for mask in (torch.ones(6, 512, dtype=torch.uint8), None):
        layer_kernels.add_dropped(x, branch, mask, 1.1)
        layer_kernels.add_dropped(None, branch, mask, 1.1)
        layer_kernels.gelu_dropped(branch, mask, 1.1)
        layer_kernels.gelu_dropped_backward(branch, branch, mask, 1.1)
        _, _, *of_rows = layer_kernels.add_norm(x, branch, mask, 1.1, scale, scale, 1e-5, dtype)
        layer_kernels.norm_backward(branch, x, *of_rows, scale, x, dtype, mask, 1.1)
    layer_kernels.add_norm(x, None, None, 1.0, scale, scale, 1e-5, dtype)
    layer_kernels.norm_backward(branch, x, *of_rows, scale, None, None, None, 1.0)
    targets = torch.zeros(6, dtype=torch.int64)
    loss_kernels.mixed_cross_entropy(branch, targets, targets, x[:, 0], 0.1)
    assert len({kernel for kernel, *_ in started}) == 11
    for launch in started:
        for capability in GPUS:
            assert compiled(*launch, capability).asm["cubin"]
