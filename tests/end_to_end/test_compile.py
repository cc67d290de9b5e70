"""--compile trains the same model, under the same names."""

import pytest
import torch
from safetensors.torch import load_file

FLAGS = [
    "--dataset", "shapes", "--subset", "200", "--depth", "18", "--width", "4", "--bs", "50",
    "--epochs", "1", "--eval_every", "0", "--lr", "0.01", "--device", "cpu", "--threads", "1",
]  # fmt: skip


@pytest.mark.slow
def test_a_compiled_run_equals_the_plain_one(tmp_path, run_entry_script):
    weights = []
    for name, flags in (("plain", []), ("compiled", ["--compile"])):
        result = run_entry_script([*FLAGS, *flags, "--output", tmp_path / name])
        assert result.returncode == 0, result.stderr
        weights.append(load_file(tmp_path / name / "checkpoints/step-00000004/model.safetensors"))
    plain, compiled = weights
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-2, atol=1e-3, msg=name)
    # A compiled run can be resumed as a plain one.
    result = run_entry_script(["--resume", tmp_path / "compiled", "--no_compile", "--epochs", "2"])
    assert result.returncode == 0, result.stderr
