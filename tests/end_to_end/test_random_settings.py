"""Settings drawn at random from the whole space: a run of two steps works, or says in one line
why it cannot (exit code 2). Never a traceback."""

import contextlib
import io
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from resnet50_test import Settings, main
from utils.config import fields

FIELDS = fields(Settings)
# Fixed, so that a run takes a fraction of a second, touches no network and no GPU.
BASE = {
    "max_steps": 2, "depth": 18, "width": 4, "device": "cpu", "threads": 1, "batch_size": 8,
    "output": "run", "data_dir": "pictures", "cache_dir": "cache", "log_every": 1,
}  # fmt: skip
FIXED = {*BASE, "config", "resume", "compile", "wandb", "dataset", "wandb_project", "wandb_tags"}
# Not to be left out: without them a run takes long.
NEEDED = {"dataset", "depth", "width", "device", "threads", "data_dir", "cache_dir"}
# A tree of pictures, one to be divided, sets that are not there, one that needs no files.
DATA = [
    {"dataset": "imagefolder"},
    {"dataset": "imagefolder", "data_dir": "one_tree", "test_fraction": 0.3},
    {"dataset": "cifar10", "data_dir": "run"},
    {"dataset": "shapes", "subset": 40},
]
OWN_VALUES = {
    "pretrained": ["trained", "trained/checkpoints", "weights.pth", "nowhere", "pictures"],
    "save_every": ["1", "0.001m", "never"],
    "milestones": ["1", "0.5,2", "x"],
    "predict": ["pictures", "pictures/train/cat/0.png", "nowhere"],
    "predictions": ["out.csv", "/proc/out.csv"],
    "image_size": [8, 9, 16, 33, 100],
    "workers": [0, 1, 2],
    "seed": [0, 7],
    "lookahead_k": [1, 2, 5],
    "epochs": [1, 2, 5],
    "crop_padding": [0, 1, 4, 40],
    "cutout": [0, 3, 64],
    "subset": [0.5, 1, 2, 30, 1000],
}


def values(name: str):
    """Valid ones mostly, and a few beyond the range."""
    field = FIELDS[name]
    meta, kind = field.metadata, str(field.type)
    if name in OWN_VALUES:
        return st.sampled_from(OWN_VALUES[name])
    if meta["choices"]:
        return st.sampled_from([*meta["choices"], "nonsense"])
    if "bool" in kind:
        return st.booleans()
    low = meta["low"] if meta["low"] is not None else meta["above"] or 0
    high = meta["high"] if meta["high"] is not None else meta["below"]
    if "int" in kind:
        return st.integers(low - 1, low + 3)
    if "float" in kind:
        return st.sampled_from([low, high if high is not None else 3.0, 0.1, 0.5, 1e-3, 1e6, -1])
    raise AssertionError(f"{name}: how are its values drawn?")


@st.composite
def random_settings(draw) -> dict:
    chosen = draw(st.lists(st.sampled_from(sorted(FIELDS.keys() - FIXED)), max_size=7, unique=True))
    others = {name: draw(values(name)) for name in chosen}
    resumed = {"resume": "trained"} if draw(st.integers(0, 4)) == 0 else {}
    if resumed and draw(st.booleans()):
        return resumed | {"max_steps": 4} | others
    return BASE | draw(st.sampled_from(DATA)) | others | resumed


def flags(chosen: dict) -> list[str]:
    return [text for name, value in chosen.items() for text in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with pictures and a trained run; the tests run in it."""
    folder = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(0)
    for tree, splits in (("pictures", {"train/": 12, "test/": 4}), ("one_tree", {"": 12})):
        for split, count in splits.items():
            for label, name in enumerate(("cat", "dog")):
                where = folder / tree / f"{split}{name}"
                where.mkdir(parents=True)
                for number in range(count):
                    pixels = rng.integers(0, 150, (16, 16, 3)) + 100 * label
                    Image.fromarray(pixels.astype(np.uint8)).save(where / f"{number}.png")
    (folder / "weights.pth").write_bytes(b"no weights")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.chdir(folder):
        assert main(flags(BASE | {"dataset": "imagefolder", "output": "trained"})) == 0
        shutil.copytree("trained", "kept")
        yield folder
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run(chosen: dict) -> str | None:
    """The line of the error; None where the run worked."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.rmtree("trained", ignore_errors=True)
    shutil.copytree("kept", "trained")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(flags(chosen))
    errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) in ((0, 0), (2, 1)), said.getvalue()
    if code == 0 and chosen.get("output") == "run" and not chosen.get("dry_run"):
        assert Path("run/summary.json").is_file()
    return errors[0] if errors else None


def check(chosen: dict) -> None:
    """Whatever is refused by name is left out, until the rest works or something else is wrong."""
    while (error := run(chosen)) is not None:
        named = [n for n in re.findall(r"--(\w+)", error) if n in chosen and n not in NEEDED]
        if not named:
            return
        chosen = {name: value for name, value in chosen.items() if name != named[0]}


OPTIONS = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}


@settings(max_examples=40, derandomize=True, **OPTIONS)
@given(random_settings())
def test_a_run_works_or_says_why_not(place, chosen):
    check(chosen)


@pytest.mark.slow
@settings(max_examples=400, **OPTIONS)
@given(random_settings())
def test_a_run_works_or_says_why_not_at_length(place, chosen):
    check(chosen)


def test_every_setting_can_be_drawn():
    for name in FIELDS.keys() - FIXED:
        values(name)
