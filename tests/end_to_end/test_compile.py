"""--compile trains the same model, under the same names."""

import pytest
import torch
from quick_runs import handlers_put_back, quick
from safetensors.torch import load_file

import vit_test

# What a ResNet has, in fewer kernels: compiling ResNet-18 takes a minute.
MODEL = """
from torch import nn

class Net(nn.Module):
    HEAD = "head"

    def __init__(self, classes):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 5, 4), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, classes)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.norm(self.conv(x))).relu().mean((2, 3)))
"""
FLAGS = [
    "--dataset", "shapes", "--subset", "200", "--model", "mine.py:Net", "--bs", "50",
    "--epochs", "1", "--eval_every", "0", "--lr", "0.01", "--device", "cpu", "--threads", "1",
]  # fmt: skip


@pytest.mark.slow
def test_a_compiled_run_equals_the_plain_one(tmp_path, monkeypatch, run_entry_script):
    monkeypatch.chdir(tmp_path)
    quick(monkeypatch)
    (tmp_path / "mine.py").write_text(MODEL)
    words = [*FLAGS, "--compile", "--output", "compiled"]
    result = run_entry_script(words, cwd=tmp_path, script="vit_test.py")
    assert result.returncode == 0, result.stderr
    with handlers_put_back():
        assert vit_test.main([*FLAGS, "--output", "plain"]) == 0
    plain, compiled = (
        load_file(tmp_path / name / "checkpoints/step-00000004/model.safetensors")
        for name in ("plain", "compiled")
    )
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-2, atol=1e-3, msg=name)
    # A compiled run can be resumed as a plain one.
    with handlers_put_back():
        assert vit_test.main(["--resume", "compiled", "--no_compile", "--epochs", "2"]) == 0
