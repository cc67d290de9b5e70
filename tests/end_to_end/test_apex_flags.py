"""What Apex's users type, in real runs: modules kept in float32, and an optimizer."""

from pathlib import Path

import pytest
import torch

from utils.training import keep_fp32

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--dataset", "shapes", "--subset", "32", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16", "--epochs", "1",
]  # fmt: skip


@pytest.fixture
def inputs_of_kept(monkeypatch) -> list[torch.dtype]:
    """The dtypes of the tensors that modules kept in float32 were given."""
    seen = []
    convert = keep_fp32.in_float32

    def noted(tensor):
        seen.append(tensor.dtype)
        return convert(tensor)

    monkeypatch.setattr(keep_fp32, "in_float32", noted)
    return seen


def test_modules_are_kept_in_every_use_of_a_model(works, fails, inputs_of_kept):
    works(*TINY, "--precision", "bf16", "--keep_fp32", "fc", "layer1.*.bn1", "--output", "run")
    assert set(inputs_of_kept) == {torch.bfloat16}
    inputs_of_kept.clear()
    works("--resume", "run", "--eval_only")
    assert set(inputs_of_kept) == {torch.bfloat16}
    assert "no such module; it has, for example" in fails(
        *TINY, "--precision", "bf16", "--keep_fp32", "layer9", "--output", "none"
    )


def test_a_run_says_what_it_does_without_apex(works, monkeypatch):
    clipped = []
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *args: clipped.append(args))
    lamb = ("--optimizer", "fusedlamb", "--clip", "none", "--keep_fp32", "fc")
    said = works(*TINY, *lamb, "--output", "run")
    assert "note: --optimizer fusedlamb is this program's lamb, the same formula" in said
    assert "note: --keep_fp32 has no effect: everything is computed in float32" in said
    assert "clip: 0.0" in Path("run/config.yaml").read_text() and not clipped
