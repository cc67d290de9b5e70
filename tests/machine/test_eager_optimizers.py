"""A run starts without torch._dynamo."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import torch
from utils.machine.eager_optimizers import keep_optimizers_eager
from utils.optim.factory import build_optimizer

keep_optimizers_eager()
for name in ("adamw", "lamb", "muon", "ngd", "sgd"):
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
    assert "torch._dynamo" not in sys.modules, name
"""


@pytest.mark.slow
def test_steps_of_optimizers_import_no_compiler():
    """Its import takes two seconds."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", CODE], cwd=root, check=True)
