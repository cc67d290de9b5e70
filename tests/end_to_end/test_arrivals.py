"""Commands as people bring them from elsewhere, started for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from utils.errors import UserError
from utils.inference.use_model import check_copy

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    "resnet50_test.py", "--dataset", "shapes", "--depth", "18", "--width", "4", "-b", "8",
    "--subset", "16", "--epochs", "1", "--threads", "1", "--device", "cpu", "--eval_every", "0",
]  # fmt: skip


def started(*words, folder: Path = ROOT) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    ended = subprocess.run(
        [*map(str, words)], cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_make_install_all():
    code, out, _ = started("make", "-n", "-B", "install-all", "VENV=/nowhere")
    assert code == 0 and "pip install" in out and "requirements-dev.txt" in out


def test_the_searches_under_their_names_elsewhere():
    """`cd tuning; python resnet50_tuning.py ...`"""
    for name in ("resnet50", "transformer"):
        words = (sys.executable, f"{name}_tuning.py", "--alpha", "0.99", "--lr", "x")
        code, _, err = started(*words, folder=ROOT / "tuning")
        assert (code, err.count("\n")) == (2, 1) and "--lr: 'x' is not a number" in err


@pytest.mark.slow
def test_a_configuration_of_colossal_ai_is_refused_in_one_line(tmp_path):
    """Before any process is started."""
    words = ("bash", ROOT / "run_distributed.sh", "vit_test.py", "--config", "vit-b16.py")
    code, out, err = started(*words, folder=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    # Found from any folder.
    assert err.strip().partition(", such as ")[2] == "recipes/vit_b16_imagenet.yaml"


@pytest.mark.slow
def test_the_search_says_how_long_it_takes(tmp_path):
    words = [
        "resnet50_tuning.py", "--workers", "4", "--ngd", "--alpha", "0.99", "--gamma", "0.75",
        *RUN[1:-2], "--trials", "2", "--jobs",
        "1", "--confirm", "0", "--no_prune", "--output", tmp_path / "study",
    ]  # fmt: skip
    code, out, err = started(sys.executable, *words, folder=ROOT / "tuning")
    assert code == 0, err
    told = next(line for line in out.splitlines() if line.startswith("a whole trial takes 0:"))
    assert "in all for 2 trials" in told and "--timeout 30m" in told
    assert "fixed by the command line, not tuned: alpha 0.99" in out
    best = (tmp_path / "study" / "best.yaml").read_text()
    assert "mixup: fixed" in best and "alpha: 0.99" in best


@pytest.mark.slow
def test_a_copy_of_the_model_and_a_second_run_by_one_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output: named\n")
    words = [sys.executable, ROOT / RUN[0], *RUN[1:], "--config", recipe]
    code, out, err = started(*words, "--checkpoint", "model_checkpoint.pth", folder=tmp_path)
    assert code == 0, err
    assert "note: --checkpoint model_checkpoint.pth: nothing is pickled" in out
    assert "model_checkpoint.safetensors, step 2, the last weights: read back" in out
    # The manual's second command is the same again.
    code, _, err = started(*words, "--checkpoint", "model_checkpoint.pth", folder=tmp_path)
    assert code == 2 and "model_checkpoint.safetensors is there" in err and err.count("\n") == 1
    code, out, err = started(
        *words, "--pretrained", "model_checkpoint.safetensors", "--seed", "1", folder=tmp_path
    )
    assert code == 0, err
    assert "note: named already holds a run, so this one is in named-2" in out
    accuracies = [json.loads((tmp_path / name / "summary.json").read_text())["steps"]
                  for name in ("named", "named-2")]  # fmt: skip
    assert accuracies == [2, 2] and not list(tmp_path.glob("*.pth"))


def test_a_copy_of_the_model_that_cannot_be_written_is_told_before_the_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*model\.safetensors"):
        check_copy(f"{tmp_path}/file/model.pth")
    check_copy(f"{tmp_path}/model.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
