"""Messages and files of a run besides its weights: figures, traces, notes, and how it ended."""

import csv
import gzip
import json
import math
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from html_pages import Page

import transformer_test
from resnet50_test import main
from utils.reporting.run_page import write_run_page
from utils.training.objective import Classification

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--dataset", "shapes", "--subset", "64", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16",
]  # fmt: skip
STEPS = 4  # in an epoch


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def metrics(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def newest_weights(run: str) -> bytes:
    return (sorted(Path(run, "checkpoints").glob("step-*"))[-1] / "model.safetensors").read_bytes()


def test_a_note_says_that_a_recipes_rates_are_for_another_optimizer(works):
    Path("recipe.yaml").write_text("lr: 0.1\nmomentum: 0.9\nweight_decay: 0.0005\n")
    flags = [*TINY, "--config", "recipe.yaml", "--epochs", 1, "--max_steps", 1]
    note = "note: --lr 0.1, --weight_decay 0.0005 as the recipe says; the default of --optimizer"
    assert f"{note} ngd is " in works(*flags, "--ngd", "--output", "ngd")
    assert "as the recipe says" not in works(*flags, "--output", "sgd")
    own = works(*flags, "--ngd", "--ngd_norm", "gradient", "--output", "gradient")
    assert "as the recipe says" not in own  # they are its own defaults


# ---- TensorBoard ------------------------------------------------------------------------------


def assert_tensorboard_has_the_metrics(run: str) -> None:
    """Asserts that TensorBoard has loss, accuracy and rate of every record once, at its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/tensorboard", size_guidance={"scalars": 0})
    events.Reload()
    expected = defaultdict(list)
    for record in metrics(run):
        chart = record["split"] + ("_steps" if record.get("average_over") == "steps" else "")
        chart += f"_{record['model']}" if "model" in record else ""
        for figure in ("loss", "accuracy", "samples_per_second"):
            if record.get(figure) is not None:
                expected[f"{figure}/{chart}"].append((record["step"], record[figure]))
        if "lr" in record:
            expected["lr"].append((record["step"], record["lr"]))
    assert {"loss/train", "loss/train_steps", "loss/test"} <= expected.keys()
    assert expected.keys() <= set(events.Tags()["scalars"])
    for tag, points in expected.items():
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in points], tag
        for (_, value), (_, wanted) in zip(found, points, strict=True):
            assert math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6), tag  # float32


def test_tensorboard_has_the_metrics_even_after_a_kill(works):
    works(*TINY, "--epochs", "2", "--log_every", "1", "--save_every", "3", "--output", "run")
    assert_tensorboard_has_the_metrics("run")
    # As if killed after step 7, with the last checkpoint at step 6: later steps are repeated,
    # and their events must not be there twice.
    shutil.rmtree("run/checkpoints/step-00000008")
    Path("run/summary.json").unlink()
    works("--resume", "run", "--epochs", "3", "--epochs_for_sched", "2")
    steps = [r["step"] for r in metrics("run") if r.get("average_over") == "steps"]
    assert steps == list(range(1, 3 * STEPS + 1))
    assert_tensorboard_has_the_metrics("run")


# ---- files by request -------------------------------------------------------------------------


def table(path: str) -> list[list[str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def test_tensorboard_of_a_branch_has_the_metrics_from_the_start(works):
    works(*TINY, "--epochs", "1", "--log_every", "1", "--output", "run")
    works("--resume", "run", "--epochs", "2", "--output", "branch")
    assert_tensorboard_has_the_metrics("branch")


def test_the_report_of_the_classes(works):
    said = works(*TINY, "--epochs", "1", "--output", "run")
    assert "worst classes of 10" in said
    told, rows = summary("run"), table("run/report/confusion.csv")
    matrix = torch.tensor([[int(cell) for cell in row[1:]] for row in rows[1:]])
    assert matrix.shape == (10, 10) and matrix.sum() == told["test_samples"] == 100
    assert 100 * matrix.trace() / matrix.sum() == pytest.approx(told["test_accuracy"])
    for name, samples, recall, *_ in table("run/report/per_class.csv")[1:]:
        row = rows[0][1:].index(name)
        assert int(samples) == matrix[row].sum()
        expected = matrix[row, row] / matrix[row].sum()
        assert float(recall) == pytest.approx(float(expected), abs=1e-4)
    assert Path("run/report/confusion.png").is_file()


@pytest.fixture
def whole_page(own_folder, monkeypatch):
    """With the report.html that users get, and time to look for near copies."""
    monkeypatch.setattr("utils.runs.report.write_run_page", write_run_page)
    monkeypatch.setattr("utils.runs.report.spare_seconds", lambda trainer: 1e9)
    monkeypatch.setattr("utils.inference.use_model.FRACTION", 1e6)


def told(run: str, tag: str = "li") -> list[str]:
    return [text for _, text in Page(Path(run, "report.html").read_text()).of(tag)]


@pytest.mark.usefixtures("whole_page")
def test_a_page_of_pictures_that_is_lost_comes_back(works):
    mixed = ["--mixup", "0.4", "--cache_dir", "cache"]
    said = works(*TINY, *mixed, "--epochs", "1", "--no_baseline", "--output", "run")
    assert said.strip().endswith("run/report.html")
    first = Path("run/report.html").read_text()
    assert "0 of 100 test samples are nearly the same as training samples" in told("run")
    assert first.count("data:image/png") >= 24 + 16  # mistakes, and the first batch
    Path("run/report.html").unlink()
    assert "to write its report: --resume run --eval_only" in works("--resume", "run")
    works("--resume", "run", "--eval_only")
    assert Path("run/report.html").read_text() == first
    Path("run/report.html").unlink()
    works("--resume", "run", "--eval_only", "--no_report")
    assert not Path("run/report.html").exists()


@pytest.mark.usefixtures("whole_page")
def test_a_page_of_texts_without_a_test(capfd):
    flags = "--dataset headlines --subset 64 --layers 1 --dim 16 --heads 2 --ffn 16 --bs 16"
    flags += " --val_fraction 0.2 --no_final_test --max_steps 2 --device cpu --threads 1"
    flags += " --no_baseline --cache_dir cache --output run"
    assert transformer_test.main(flags.split()) == 0
    out = capfd.readouterr().out
    assert "worst classes of 4" in out and Path("run/report/confusion.csv").is_file()
    (copies,) = [text for text in told("run") if "nearly the same as training samples" in text]
    assert copies.split(" of ")[1].startswith("120 validation samples")
    assert (f"note: {copies}, which flatters" in out) is not copies.startswith("0 ")
    assert sum(text.startswith("[CLS] ") for text in told("run", "blockquote")) == 4


@pytest.mark.slow
def test_the_report_of_an_earlier_checkpoint_is_another_one(works):
    works(*TINY, "--epochs", "2", "--save_every", "1e", "--report", "--output", "run")
    files = ("per_class.csv", "confusion.csv", "confusion.png")
    before = {name: Path("run/report", name).read_bytes() for name in files}
    first, *_, last = sorted(Path("run/checkpoints").iterdir())
    said = works("--resume", first, "--eval_only", "--report")
    assert f"run/report/{first.name}" in said
    assert all(Path("run/report", first.name, name).is_file() for name in files)
    works("--resume", last, "--eval_only", "--report")
    assert before == {name: Path("run/report", name).read_bytes() for name in files}
    assert [path.name for path in Path("run/report").iterdir() if path.is_dir()] == [first.name]


@pytest.mark.slow
def test_the_trace_of_a_profile(works):
    said = works(*TINY, "--max_steps", "11", "--epochs", "3", "--eval_every", "0", "--profile",
                 "--output", "run")  # fmt: skip
    assert "profile: run/trace.json.gz" in said
    with gzip.open("run/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert "aten::convolution" in names and any("Backward" in name for name in names)
    works(*TINY, "--max_steps", "11", "--epochs", "3", "--eval_every", "0", "--output", "plain")
    assert newest_weights("run") == newest_weights("plain")


@pytest.mark.parametrize("output", [[], ["--output", "chosen"]])
def test_a_dry_run_prints_its_lines_and_leaves_a_sheet(works, tmp_path, monkeypatch, output):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    said = works(*TINY, "--dry_run", *output)
    for word in (
        "dry run:", "first step", "samples/s", "an epoch", "the run", "memory", "GiB", "disk",
        "MiB free", "as the network sees it", "no run was kept",
    ):  # fmt: skip
        assert word in said, word
    # PyTorch's compiler makes a folder when it is first imported, if that is here.
    assert all(path.name.startswith("torchinductor_") for path in scratch.iterdir())
    sheet = Path("chosen-batch.png" if output else "runs/run-batch.png")
    assert sorted(path for path in Path().rglob("*") if path.is_file()) == [sheet]


def test_a_dry_run_beside_a_run_leaves_it_as_it_was(works):
    works(*TINY, "--epochs", "1", "--output", "run")
    before = {path: path.stat().st_mtime_ns for path in sorted(Path("run").rglob("*"))}
    works("--resume", "run", "--epochs", "2", "--dry_run")
    assert {path: path.stat().st_mtime_ns for path in sorted(Path("run").rglob("*"))} == before


# ---- how a run ends ---------------------------------------------------------------------------


def test_out_of_memory_names_a_batch_and_loses_no_step(works, monkeypatch, capfd):
    forward, calls = Classification.__call__, []

    def limited(self, inputs, targets, mixing=None):
        calls.append(len(inputs))
        if len(inputs) > 8 and len(calls) > 5:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return forward(self, inputs, targets)

    flags = [*TINY, "--epochs", "2", "--eval_every", "0", "--log_every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "__call__", limited)
        assert main([*flags, "--output", "run"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    (line,) = errors
    assert "--batch_size 16 does not fit, --batch_size 8 may" in line
    assert "--accumulation_steps 2" in line and "2.00 GiB" in line
    assert "Step 5 is saved" in line and "--pretrained run" in line
    # The command that the line names, if there is still no more memory:
    smaller = ["-b", "8", "--accumulation_steps", "2", "--pretrained", "run", "--output", "small"]
    works(*flags, "--max_steps", "1", *smaller)
    assert summary("small")["global_batch_size"] == 16
    works("--resume", "run")  # and if there is
    works(*flags, "--output", "whole")
    assert newest_weights("run") == newest_weights("whole")


def test_a_model_for_which_no_sample_fits_is_reported(monkeypatch, capfd):
    def full(*_):
        raise torch.OutOfMemoryError("no memory at all")

    monkeypatch.setattr(Classification, "__call__", full)
    assert main([*TINY, "-b", "2", "--output", "run"]) == 2
    error = capfd.readouterr().err
    assert "no smaller size is possible; take a smaller model or smaller inputs" in error
    assert "saved" not in error and "Traceback" not in error
    assert not Path("run/checkpoints").exists()


@pytest.mark.slow
def test_early_stop_and_the_best_weights_beside_the_last(works):
    flags = [*TINY, "--subset", "0.03", "--val_fraction", "0.02", "--epochs", "40"]
    said = works(*flags, "--lr", "0.3", "--early_stop_patience", "1", "--output", "run")
    told = summary("run")
    assert "stopped early" in said and told["status"] == "stopped_early"
    assert told["steps"] < 40 * STEPS and told["best_epoch"] == told["epochs"] - 1
    vals = [r["accuracy"] for r in metrics("run") if r["split"] == "val"]
    assert vals[-1] <= vals[-2] == max(vals) == told["best_val_accuracy"]

    best = f"run/{told['best_checkpoint']}"
    assert sorted(Path("run/checkpoints").glob("step-*"))[-1] != Path(best)
    assert told["model_weights"] == "best" and best.endswith(f"-{told['model_step']:08}")
    assert told["model_test_accuracy"] == told["best_test_accuracy"]
    assert f"test accuracy {told['model_test_accuracy']:.2f} % (" in said
    assert ") on 100 samples with the best" in said
    for place, figure in (
        ([best], "best_test_accuracy"),
        (["run"], "model_test_accuracy"),
        (["run", "--use", "last"], "test_accuracy"),
    ):
        said = works("--resume", *place, "--eval_only")
        assert f"test accuracy {told[figure]:.2f} % (" in said

    said = works("--resume", "run")
    assert "has stopped early" in said and "--early_stop_patience" in said
    said = works("--resume", "run", "--epochs", f"{told['epochs']:.0f}")
    assert "give a larger --epochs and --early_stop_patience" in said
    assert summary("run") == told
    works("--resume", "run", "--early_stop_patience", "2")
    assert summary("run")["steps"] > told["steps"]


def test_a_run_without_its_test_is_tested_when_asked(works):
    flags = [*TINY, "--subset", "0.03", "--val_fraction", "0.02", "--epochs", "1"]
    works(*flags, "--no_final_test", "--output", "run")
    said = works("--resume", "run")
    assert "not tested" in said and "--resume run --final_test" in said
    assert summary("run")["test_accuracy"] is None
    weights = newest_weights("run")
    works("--resume", "run", "--final_test")
    works(*flags, "--output", "whole")
    told, whole = summary("run"), summary("whole")
    for name in ("status", "steps", "test_accuracy", "best_test_accuracy", "best_checkpoint"):
        assert told[name] == whole[name]
    assert newest_weights("run") == weights
    assert "is finished: 1 epoch, test accuracy" in works("--resume", "run")


# ---- more epochs than planned -----------------------------------------------------------------


@pytest.mark.slow
def test_more_epochs_change_the_schedule_unless_the_old_plan_is_kept(works):
    flags = [*TINY, "--eval_every", "0"]
    for output in ("new plan", "old plan"):
        works(*flags, "--epochs", "2", "--output", output)
    said = works("--resume", "new plan", "--epochs", "3")
    note = "note: the cosine schedule spans 12 steps now and spanned 8"
    assert note in said and "--epochs_for_sched 2 keeps the old schedule" in said
    said = works("--resume", "old plan", "--epochs", "3", "--epochs_for_sched", "2")
    assert "note: the cosine schedule" not in said
    works(*flags, "--epochs", "3", "--epochs_for_sched", "2", "--output", "whole")
    assert newest_weights("old plan") == newest_weights("whole")
    assert newest_weights("new plan") != newest_weights("whole")
