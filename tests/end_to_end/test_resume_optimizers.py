"""Every optimizer in a real run: resumed from the middle, it ends as the whole run to the byte."""

import json
import shutil
from pathlib import Path

import pytest
from own_optimizers import OWN

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--dataset", "shapes", "--subset", "64", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16", "--save_every", "1", "--epochs", "1", "--ema_decay", "0.9",
]  # fmt: skip
OWN_FLAGS = {"ngd": ["--ngd_alpha", "2", "--ngd_rank", "3", "--ngd_axes", "channels"]}
STEPS = 4  # in the epoch


# Around every optimizer: tests/optim/test_optimizer_steps.py.
WITH_LOOKAHEAD = [(name, ["--lookahead_k", "3"]) for name in ("sgd", "muon")]


@pytest.mark.parametrize(("name", "lookahead"), [*((name, []) for name in OWN), *WITH_LOOKAHEAD])
def test_a_resumed_run_is_the_whole_run(works, name, lookahead):
    flags = ["--optimizer", name, *OWN_FLAGS.get(name, []), *lookahead]
    works(*TINY, *flags, "--output", "whole")
    summary = json.loads(Path("whole/summary.json").read_text())
    assert summary["optimizer"] == name and summary["steps"] == STEPS
    shutil.copytree("whole", "half")
    for step in (STEPS - 1, STEPS):
        shutil.rmtree(f"half/checkpoints/step-{step:08}", ignore_errors=True)
    assert f"from step {STEPS - 2}" in works("--resume", "half")
    last = f"checkpoints/step-{STEPS:08}"
    for file in ("model", "average", "optimizer"):
        saved = [Path(run, last, f"{file}.safetensors").read_bytes() for run in ("whole", "half")]
        assert saved[0] == saved[1], file
    states = [json.loads(Path(run, last, "state.json").read_text()) for run in ("whole", "half")]
    assert states[0]["optimizer"] == states[1]["optimizer"]
