"""Training, evaluation, predictions and export without the optional packages (docs/install.md)."""

import os
import subprocess
import sys

import pytest
from pages import ROOT
from patience import PATIENCE
from PIL import Image

from utils.machine.packages import OPTIONAL

pytestmark = pytest.mark.slow

SMALL = "--max_steps 2 --bs 4 --subset 40 --threads 1 --device cpu --output run --report"
PICTURES = f"resnet50_test --dataset shapes --depth 18 --width 4 {SMALL}"
TEXTS = f"transformer_test --dataset headlines --layers 1 --dim 16 --heads 2 --ffn 16 {SMALL}"
NOTES = (
    "note: plots are left out, as matplotlib is not installed: pip install matplotlib",
    "note: files for TensorBoard are left out, as tensorboard is not installed: pip install "
    "tensorboard",
)
# Each argument is the command line of an entry. The test sets are small.
CODE = """
import importlib, sys
from utils.data.images import shapes
from utils.data.texts import headlines
shapes.TEST_PER_CLASS = headlines.TEST_PER_CLASS = 10
for line in sys.argv[1:]:
    entry, *flags = line.split()
    assert importlib.import_module(entry).main(flags) == 0, line
"""


@pytest.fixture
def succeed(tmp_path):
    """succeed(lines) -> what the entries print, in a process that finds no optional package."""
    modules = [package.module for package in OPTIONAL]
    text = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"  # None bars the import
    (tmp_path / "sitecustomize.py").write_text(text)

    def run(*lines: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CODE, *lines],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_pictures(succeed, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    used = "resnet50_test --resume run"
    out = succeed(
        PICTURES, f"{used} --eval_only --no_report", f"{used} --predict black.png",
        f"{used} --export safetensors",
    )  # fmt: skip
    assert all(out.count(note) == 1 for note in NOTES)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {"metrics.jsonl", "summary.json", "predictions.csv", "export", "report"}
    assert not left & {"curves.png", "tensorboard"}
    assert {path.name for path in (tmp_path / "run" / "report").iterdir()} == {
        "per_class.csv",
        "confusion.csv",
    }


def test_texts_and_the_check(succeed, tmp_path):
    (tmp_path / "new.txt").write_text("rain\nshares\n")
    used = "transformer_test --resume run"
    out = succeed(
        TEXTS, f"{used} --predict new.txt", f"{used} --export safetensors",
        "transformer_test --check --device cpu",
    )  # fmt: skip
    assert all(out.count(note) == 1 for note in NOTES)
    assert (tmp_path / "run" / "export" / "tokenizer.json").is_file()
    assert "all checks have passed" in out
    assert "matplotlib for plots; tensorboard for TensorBoard; optuna for tuning" in out
