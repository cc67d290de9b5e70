"""The precision of float32 holds within its context; a run starts without torch._dynamo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_tf32 import precision

from utils.machine.backends import float32_products

GPU = torch.backends.cuda.matmul, torch.backends.cudnn.conv
CPU = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv


def settings() -> list[str]:
    return [backend.fp32_precision for backend in (*GPU, *CPU)]


@pytest.mark.parametrize("kind", ["float32", "fast"])
@pytest.mark.parametrize("own", [(), GPU, CPU], ids=["defaults", "gpu", "cpu"])
def test_settings_are_restored(kind, own):
    wanted = ["ieee"] * 4 if kind == "float32" else ["tf32", "tf32", "bf16", "bf16"]
    with precision("tf32" if own is GPU else "bf16", *own):
        before = settings()
        with float32_products(kind):
            assert settings() == wanted
            with float32_products("float32"):
                assert settings() == ["ieee"] * 4
            assert settings() == wanted
        assert settings() == before
        with pytest.raises(KeyError), float32_products(kind):
            raise KeyError
        assert settings() == before


@pytest.mark.parametrize("matmuls", ["highest", "high"])
@pytest.mark.parametrize("convolutions", [False, True])
def test_the_older_flags_can_be_read_afterwards(convolutions, matmuls):
    """PyTorch raises on reading them if the newer settings differ."""
    before = settings()
    try:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(matmuls)
        with float32_products("float32"):
            torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert torch.backends.cudnn.allow_tf32 == convolutions
        assert torch.get_float32_matmul_precision() == matmuls
        assert torch.backends.cuda.matmul.allow_tf32 == (matmuls == "high")
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        for backend, precision in zip((*GPU, *CPU), before, strict=True):
            backend.fp32_precision = precision


CODE = """
import sys
import torch
from utils.machine.eager_optimizers import eager_optimizers
from utils.optim.factory import build_optimizer

def take_steps(name):
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(name, model, lr=0.1, weight_decay=0.01, lookahead_k=2)
    plain = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(model.weight, plain), name

for name in ("adamw", "lamb", "muon", "ngd", "sgd"):
    with eager_optimizers():
        take_steps(name)
        assert "torch._dynamo" not in sys.modules, name
take_steps("adamw")  # as PyTorch has it
assert "torch._dynamo" in sys.modules
"""


@pytest.mark.slow
def test_steps_of_optimizers_import_no_compiler():
    """Its import takes two seconds."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", CODE], cwd=root, check=True)
