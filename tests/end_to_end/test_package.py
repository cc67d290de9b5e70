"""The wheel, installed beside the packages of the tests: its commands, from another folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image
from project_copy import copy_project
from quick_runs import QUICK_PROCESSES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
TINY = [
    "--width", 4, "--bs", 8, "--max_steps", 2, "--device", "cpu", "--no_report", "--workers", 0,
]  # fmt: skip


@pytest.fixture(scope="module")
def fewhours(tmp_path_factory):
    """fewhours(*words, code=0, ...) -> what the command prints, in a folder that has
    `pictures/`, of two classes, and a `utils` of somebody else's."""
    base = tmp_path_factory.mktemp("package")
    project, site, place = copy_project(base / "project"), base / "site", base / "elsewhere"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # By the setuptools that PyTorch brings: no network.
    words = ["wheel", "--no-deps", "--no-build-isolation", "-w", base, project]
    subprocess.run([*pip, *words], check=True)
    (wheel,) = base.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"fewhours", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    for name in ("red", "blue"):
        (place / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            colour = (200, 0, number) if name == "red" else (number, 0, 200)
            noise = np.random.default_rng(number).integers(0, 50, (16, 16, 3)) + colour
            file = place / "pictures" / name / f"{number}.png"
            Image.fromarray(noise.astype(np.uint8)).save(file)
    (place / "utils.py").write_text("raise ImportError('somebody else')\n")

    def run(*words, code=0, program=site / "bin" / "fewhours", **variables) -> str:
        environment = {n: v for n, v in os.environ.items() if n != "NPROC"}
        environment["PYTHONPATH"] = os.pathsep.join([str(site), QUICK_PROCESSES])
        done = subprocess.run(
            [program, *map(str, words)], cwd=place, text=True,
            env=environment | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.place = place
    return run


def summary(fewhours, name: str) -> dict:
    return json.loads((fewhours.place / name / "summary.json").read_text())


def test_a_folder_is_trained_on_and_the_run_used(fewhours):
    said = fewhours("pictures", "--test_fraction", 0.2, "--output", "runs/a", *TINY)
    assert "\nfewhours resnet50 --dataset imagefolder " in said
    # Started there, it goes on in a checkout.
    words = [sys.executable, ROOT / "resnet50_test.py", "--resume", "runs/a", "--max_steps", "3"]
    subprocess.run(words, cwd=fewhours.place, check=True, capture_output=True, timeout=PATIENCE)
    said = fewhours("--resume", "runs/a", "--max_steps", 4)
    assert "from step 3" in said and summary(fewhours, "runs/a")["steps"] == 4
    fewhours("resnet50", "--resume", "runs/a", "--predict", "pictures/red")
    alone = (fewhours.place / "runs/a/predictions.csv").read_text()
    assert len(alone.splitlines()) == 21
    said = fewhours("ensemble", "runs/a", "runs/a", "--predict", "pictures/red")
    assert said.endswith("20 predictions of 2 runs together: predictions.csv\n")
    assert (fewhours.place / "predictions.csv").read_text() == alone
    assert "together: test accuracy " in fewhours("ensemble", "runs/a", "runs/a")


def test_a_recipe_with_workers(fewhours):
    words = ["--config", "recipes/shapes_demo.yaml", *TINY, "--workers", 1, "--decode", "always"]
    for seed in (0, 1):
        said = fewhours("resnet50", "pictures", "--dataset", "imagefolder", "--test_fraction", 0.2,
                        "--depth", 18, "--seed", seed, "--output", f"runs/b{seed}",
                        *words)  # fmt: skip
        assert "resnet18w4" in said
    said = fewhours("compare", "runs/b0", "runs/b1")
    assert "page: compare.html" in said


def test_two_processes(fewhours):
    words = ["shapes", "--epochs", 1, "--subset", 0.02, *TINY, "--output", "runs/two"]
    fewhours("launch", *words, NPROC="2")
    assert summary(fewhours, "runs/two")["world_size"] == 2
    said = fewhours("launch", "resnet50", "--resume", "nowhere", code=2, NPROC="2")
    assert said.startswith("error: --resume nowhere: no such folder")


def test_a_search(fewhours):
    words = "--dataset shapes --width 4 --depth 18 --bs 64 --params lr --subset 0.04 --epochs 1"
    words += " --trials 1 --no_prune --confirm 0 --jobs 1 --device cpu --output runs/search"
    fewhours("tune", "resnet50", *words.split())
    recipe = (fewhours.place / "runs/search/best.yaml").read_text()
    assert "fewhours resnet50 --config best.yaml" in recipe


WITHOUT_A_GUARD = """
import fewhours
run = fewhours.train("pictures", test_fraction=0.2, width=4, bs=8, max_steps=2, device="cpu",
                     workers=1, decode="always", output="runs/python", baseline=False)
print("trained", run.summary["steps"], len(run.predict("pictures/red")), run.report)
try:
    fewhours.load("nowhere").folder
except fewhours.UserError as error:
    print(error)
"""


def test_a_script_that_trains_without_a_main_guard(fewhours):
    """Worker processes do not run it again."""
    (fewhours.place / "script.py").write_text(WITHOUT_A_GUARD)
    said = fewhours("script.py", program=sys.executable)
    assert said.count("\nfewhours resnet50 ") == 1 and "worker process died" not in said
    assert "trained 2 20 runs/python/report.html\nnowhere: there is no config.yaml" in said


def test_commands_in_help_and_messages_work_here(fewhours):
    said = fewhours("--help") + fewhours("resnet50", "--help") + fewhours("launch", "--help")
    assert "usage: fewhours resnet50 " in said and "\nfewhours launch ENTRY" in said
    assert not {"python", "bash"} & {*said.split()}
    said = fewhours("--time", "1m", code=2)
    assert "error: the first word names the data: fewhours my" in said
