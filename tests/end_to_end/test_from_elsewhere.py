"""Commands as they are typed for other repositories, started as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]
# Its constructor takes no arguments, as that of the guide to DDP.
TOY_MODEL = """
from torch import nn

class Toy_Net(nn.Sequential):
    def __init__(self):
        convolution = nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU()
        super().__init__(*convolution, nn.Flatten(), nn.Linear(512, 10))
"""
GUIDE = (
    "vit_test.py -n=DDP_warmup --model toy_model.py:Toy_Net -d shapes -l 0.1 -b 16 -e 1 -w 1 "
    "-t linear -s 42 -p ./experiment_model/ --subset 64 --device cpu --threads 1"
)
# The keys of the recipes of the QSR repository.
RECIPE = """
model: vit
bn: 0
total_batch_size: 8
physical_batch_size: 4
nw: 0
optimizer: localadamw
max_lr: 0.01
wd: 0.1
warmup: 1
momentum: 0
nesterov: 0
beta1: 0.9
beta2: 0.99
scheduler: cosine
epochs: 2
steps_per_epoch: 4
group_weight: 0
log_per_step: 1
"""
QSR = (
    "vit_test.py pictures --seed 5 --recipe-pth recipe.yml --model vit_base --optimizer localadamw "
    "--epochs-for-sche 2 --warmup-steps 2 --log-per-step 1 --init-h 2 --min-h 2 --alpha 0.02 "
    "--power 2 --avg-m 0 --avg-v 0 --scheduler cosine --save-freq 1 --debug 1 --strong-aug 1 "
    "--gradient-clipping inf --layers 1 --dim 16 --heads 2 --ffn 32 --image_size 64 --device cpu "
    "--output run"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)


def test_the_guide_to_ddp_and_its_toy_model():
    Path("toy_model.py").write_text(TOY_MODEL)
    script, *flags = GUIDE.split()
    command = [sys.executable, str(ROOT / script), *flags]
    first = run(*command)
    assert first.returncode == 0, first.stderr
    assert "note: -t linear: the warm-up is linear" in first.stdout
    summary = json.loads(Path("experiment_model/DDP_warmup/summary.json").read_text())
    assert (summary["model"], summary["seed"], summary["steps"]) == ("Toy_Net", 42, 4)
    again = run(*command)
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert "another folder, such as --output experiment_model/DDP_warmup-2" in again.stderr


def test_a_script_and_a_recipe_of_the_qsr_repository_by_two_processes():
    for number in range(32 + 8):
        folder = Path("pictures", "train" if number < 32 else "test", f"class{number % 2}")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    Path("recipe.yml").write_text(RECIPE)
    launcher = ["bash", str(ROOT / "run_distributed.sh")]
    done = run(*launcher, *QSR.split(), NPROC="2")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["steps"], summary["global_batch_size"], summary["strategy"]) == (8, 8, "local")
    assert "note: bn 0: it follows from the model (recipe.yml)" in done.stdout
    settings = Path("run/config.yaml").read_text()
    for line in ("patch_size: 16", "dim: 16", "decay_all: true", "drop_last: true", "log_every: 1"):
        assert f"\n{line}  # " in settings
