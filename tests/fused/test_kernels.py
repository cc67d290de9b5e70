"""The Triton kernels: correct in Triton's interpreter, and replaced by PyTorch where unusable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils.fused import kernels

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_are_correct_in_the_interpreter():
    """All of kernel_checks.py in one process: Triton reads TRITON_INTERPRET on import."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "kernel_checks.py"]
    result = subprocess.run(
        command, cwd=HERE, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


@pytest.fixture
def usability_unknown(monkeypatch):
    """Forgets whether kernels are usable, and treats CPUs as GPUs."""
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    monkeypatch.delitem(sys.modules, "utils.fused.kernels.image_kernels", raising=False)
    monkeypatch.delattr(kernels, "image_kernels", raising=False)
    kernels.unusable.cache_clear()
    yield
    kernels.unusable.cache_clear()


def test_pytorch_computes_without_triton(usability_unknown, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.images(torch.ones(2, 3, 1, 1)) is None
    assert "Triton cannot be imported" in kernels.unusable()


def test_pytorch_computes_where_triton_fails(usability_unknown):
    pytest.importorskip("triton")
    assert kernels.layers(torch.ones(2, 3)) is None
    assert kernels.unusable().startswith("Triton: ") and "\n" not in kernels.unusable()
