"""Mixup from the command line: a run's files and messages, and how it is resumed."""

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--dataset", "shapes", "--subset", "80", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16", "--epochs", "2", "--log_every", "2",
]  # fmt: skip
META = ["--meta_learning", "--meta_every", "2", "--meta_batch", "8", "--alpha", "0.5"]


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def newest(run: str) -> Path:
    return sorted(Path(run, "checkpoints").glob("step-*"))[-1]


@pytest.mark.parametrize(
    ("flags", "mixup"),
    [
        (["--mixup", "0.4"], "fixed"),
        (["--cutmix", "1", "--mixup_mode", "elem"], "cutmix"),
        (["--mixup", "1", "--cutmix", "1", "--mixup_inter", "--log_clean_accuracy"],
         "fixed, cutmix"),
        (["--mixup", "auto"], "auto"),
        (["--meta_learning", "--meta_batch", "8", "--meta_form", "sample"], "meta"),
    ],
)  # fmt: skip
def test_messages_and_files_of_a_run(works, flags, mixup):
    said = works(*TINY, *flags, "--output", "run")
    assert "accuracy weighted by lambda" in said
    assert (", unmixed " in said) == ("--log_clean_accuracy" in flags)
    left = summary("run")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    epoch = [line for line in lines if line.get("average_over") == "epoch"][-1]
    assert left["mixup"] == mixup and left["train_accuracy"] == epoch["accuracy_weighted"]
    assert not Path("run/mixup_policy.png").exists()
    assert not (newest("run") / "mixup.safetensors").exists()


AUTO = ["--mixup", "auto", "--cutmix", "1", "--subset", "500", "--epochs", "10", "--bs", "125"]


def interrupted(whole: str, step: int) -> str:
    """A copy of a finished run in which the checkpoints after this step are no longer sound."""
    shutil.copytree(whole, "part")
    for folder in Path("part/checkpoints").glob("step-*"):
        if folder.name > f"step-{step:08}":
            (folder / "SHA256SUMS").write_text("")
    Path("part/summary.json").unlink()
    return "part"


@pytest.mark.slow
def test_a_run_says_what_it_measures_and_keeps_the_strength_when_resumed(works):
    said = works(*TINY, *AUTO, "--output", "whole", "--save_every", "13", "--checkpoint_hist", "9")
    assert "50 of the training samples are held out for the first 4 epochs" in said
    lines = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["split"] == "mixing"]
    assert len(measured) == 1 and measured[0]["step"] == 12
    assert measured[0]["strength"] == summary("whole")["mixing_strength"]
    assert summary("whole")["train_samples"] == 500 and summary("whole")["mixup"] == "auto, cutmix"
    assert "held out" not in works("--resume", interrupted("whole", step=13))
    ours, theirs = (newest(run) / "model.safetensors" for run in ("part", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert summary("part")["mixing_strength"] == summary("whole")["mixing_strength"]


def test_too_few_samples_for_auto_are_said(works):
    said = works(*TINY, "--mixup", "auto", "--output", "run")
    assert "note: 80 training samples are too few for --mixup auto" in said
    assert summary("run")["mixing_strength"] == 0.2


@pytest.mark.slow
def test_a_run_that_is_too_short_for_auto_is_not_mixed_and_says_so(works):
    said = works(*TINY, *AUTO, "--epochs", "3", "--output", "run")
    assert "note: the run is too short for --mixup auto" in said and "held out" not in said
    assert summary("run")["mixing_strength"] == 0


@pytest.mark.slow
def test_a_resumed_run_continues_the_policy(works, fails):
    works(*TINY, *META, "--output", "whole", "--save_every", "3", "--checkpoint_hist", "9")
    assert Path("whole/mixup_policy.png").is_file()
    interrupted("whole", step=3)
    assert "--meta_every 3" in fails("--resume", "part", "--meta_every", "3")
    works("--resume", "part")
    for name in ("model.safetensors", "mixup.safetensors", "optimizer.safetensors"):
        ours, theirs = (newest(run) / name for run in ("part", "whole"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_too_few_samples_for_a_clean_batch_are_refused(fails):
    error = fails(*TINY, *META, "--bs", "80")
    assert "--mixup meta" in error and "--batch_size" in error
