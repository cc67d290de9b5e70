"""--fused from the command line: the same weights as without; where it is left out."""

import contextlib
import io

import pytest
import torch
from quick_runs import handlers_put_back, quick
from safetensors.torch import load_file

import resnet50_test
import transformer_test
from utils.settings.config import parse

PICTURES = [
    "--dataset", "shapes", "--subset", "60", "--depth", "18", "--width", "4", "--bs", "12",
    "--max_steps", "4", "--lr", "0.01", "--device", "cpu", "--threads", "1", "--eval_every", "0",
]  # fmt: skip
TEXTS = [
    "--dataset", "headlines", "--subset", "60", "--layers", "2", "--dim", "16", "--heads", "2",
    "--ffn", "16", "--bs", "12", "--max_steps", "4", "--device", "cpu", "--threads", "1",
    "--eval_every", "0",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    quick(monkeypatch)
    with handlers_put_back():
        yield


def run(main, *flags) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main([str(flag) for flag in flags])
    return code, said.getvalue()


META = ["--meta_learning", "--meta_every", "1", "--meta_exact"]
BOTH = ["memory", "speed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "flags", "modes"),
    [
        (resnet50_test.main, [*PICTURES, "--mixup", "0.3", "--label_smoothing", "0.1"], BOTH),
        pytest.param(*(resnet50_test.main, [*PICTURES, *META], ["memory"]), marks=pytest.mark.slow),
        (transformer_test.main, [*TEXTS, "--mixup", "0.3"], BOTH),
    ],
    ids=["mixup", "meta-mixup", "texts"],
)
def test_a_run_equals_the_plain_one(tmp_path, main, flags, modes):
    weights = []
    for mode in ("none", *modes):
        code, said = run(main, *flags, "--fused", mode, "--output", tmp_path / mode)
        assert code == 0, said
        weights.append(load_file(tmp_path / mode / "checkpoints/step-00000004/model.safetensors"))
    plain, *others = weights
    for fused in others:
        assert list(plain) == list(fused)
        for name, tensor in plain.items():
            torch.testing.assert_close(fused[name], tensor, rtol=0, atol=1e-5, msg=name)
    # A fused run can be used and resumed like a plain one.
    resumed = ["--resume", tmp_path / "memory"]
    assert run(main, *resumed, "--eval_only")[0] == 0
    assert run(main, *resumed, "--export", "safetensors")[0] == 0
    assert run(main, *resumed, "--fused", "none", "--max_steps", "6")[0] == 0


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--compile"], "--compile decides"),
        (["--mixup", "meta", "--meta_form", "sample"], "virtual steps"),
        (["--pretrained", "x.pth", "--freeze_backbone"], "keeps no activations"),
    ],
)
def test_it_is_left_out_where_it_has_no_effect(flags, reason, mode):
    said = []
    argv = [str(word) for word in (*PICTURES, "--fused", mode, *flags)]
    settings, _ = parse(resnet50_test.Settings, argv, "", said.append)
    assert settings.fused == "none"
    assert len(said) == 1 and "note: --fused has no effect" in said[0] and reason in said[0]
