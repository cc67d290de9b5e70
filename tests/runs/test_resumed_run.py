"""What a resumed run says of changes, and where it finds the best checkpoint."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.checkpoints.checkpoint import (
    RUN_INFO,
    Checkpoint,
    Checkpoints,
    DamagedCheckpoint,
    read_checkpoint,
)
from utils.errors import UserError
from utils.exchange import Exchange
from utils.reporting.run_folder import LOCK_OUTLIVES
from utils.runs.records import open_metrics
from utils.runs.report import Report
from utils.runs.resume import load_checkpoint, which_weights
from utils.runs.run import Run
from utils.training.evaluation import Evaluation


class Ranks(Exchange):
    """Rank 0, to which the others answer as they are told to."""

    def __init__(self, *others):
        self.size, self.others = 1 + len(others), others

    def gather_json(self, value):
        return [value, *(value if other == "same" else other for other in self.others)]

    def barrier(self):
        pass


def saved(
    folder: Path,
    step: int,
    best: int | None = None,
    run_info: dict | None = None,
    **progress,
) -> Path:
    state = {"progress": {"best_step": best} | progress, RUN_INFO: run_info or {}}
    parts = {"model": {"weight": torch.full((2,), float(step))}, "optimizer": {}}
    checkpoint = Checkpoint(step, state, parts)
    return Checkpoints(folder / "checkpoints", keep=9).save(checkpoint, best)


def run_of(folder: Path, strategy="ddp", processes=1, **entries) -> Run:
    """A run that is resumed from `folder`, as far as it is needed here."""
    run, said = Run.__new__(Run), []
    run.settings = SimpleNamespace(
        resume=str(folder),
        action=SimpleNamespace(trains=True),
        strategy=strategy,
        trains_locally=strategy == "local",
        mixing_name="none",
        accumulation_steps=1,
        dry_run=False,
        dist_timeout=10.0,
        eval_views="none",
    )
    run.exchange = Ranks(*["same"] * (processes - 1))
    run.workers = SimpleNamespace(size=processes)
    run.device, run.precision = torch.device("cpu"), SimpleNamespace(name="fp32")
    run.threads, run.folder, run.place = 1, None, None
    run.console = SimpleNamespace(say=said.append)
    run.said = said
    vars(run).update(entries)
    return run


# ---- what has changed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, now, named",
    [
        (("ddp", 2), ("fsdp", 2), ["strategy is fsdp now and was ddp before"]),
        (("fsdp", 2), ("ddp", 2), ["strategy is ddp now and was fsdp before"]),
        (("local", 2), ("ddp", 2), ["strategy is ddp now and was local before"]),
        (("ddp", 2), ("local", 2), ["strategy is local now and was ddp before"]),
        (("ddp", 2), ("ddp", 2), []),
        (("ddp", 1), ("fsdp", 1), []),  # alone, both are the same
        (("ddp", 2), ("ddp", 4), ["processes is 4 now and was 2 before"]),
    ],
)
def test_a_note_names_what_is_not_as_it_was(tmp_path, before, now, named):
    saved(tmp_path, 3, run_info=run_of(tmp_path, *before).numerical_environment())
    run = run_of(tmp_path, *now)
    assert load_checkpoint(run).step == 3
    assert run.said == [
        f"note: {change}: the result will not be the same to the bit" for change in named
    ]


def test_a_checkpoint_from_before_the_strategy_was_noted_gives_no_note(tmp_path):
    facts = run_of(tmp_path, "ddp", 2).numerical_environment()
    del facts["strategy"]
    saved(tmp_path, 3, run_info=facts)
    run = run_of(tmp_path, "fsdp", 2)
    load_checkpoint(run)
    assert run.said == []


# ---- the lock of a machine that has died ------------------------------------------------------


@pytest.mark.parametrize(
    "launched, output, minutes, wait",
    [
        (True, "run", 10.0, LOCK_OUTLIVES),
        (True, "run", 0.5, 30),  # the other processes wait no longer
        (True, "other", 10.0, 0),
        (False, "run", 10.0, 0),
    ],
)
def test_only_a_resumed_run_of_several_processes_waits(
    tmp_path, monkeypatch, launched, output, minutes, wait
):
    given = {}

    def run_folder(path, **options):
        given.update(options)
        raise UserError("far enough")

    monkeypatch.setattr("utils.runs.run.RunFolder", run_folder)
    run = run_of(tmp_path / "run", place=SimpleNamespace(rank=0) if launched else None)
    run.settings.dist_timeout = minutes
    with pytest.raises(UserError, match="far enough"):
        run._open_folder(tmp_path / output)
    assert given["wait"] == wait and given["resume"] is (output == "run")


BEST = ("best_step", "best_epoch", "best_val_accuracy", "best_val_loss", "best_val_value")


# ---- the best checkpoint ----------------------------------------------------------------------


@pytest.fixture
def old(tmp_path) -> Path:
    """The best checkpoint, of step 1, where a kill between two renames has left it."""
    path = saved(tmp_path, 1, best=1)
    saved(tmp_path, 2, best=1)
    return path.rename(path.with_name(f"{path.name}.old"))


def test_the_weights_that_are_used_are_named(tmp_path, old):
    """The best checkpoint is known under its other name, too."""
    last = Checkpoints(tmp_path / "checkpoints").load()
    text = "step 2, the last weights (best on the validation split: step 1)"
    assert which_weights(last, tmp_path) == text
    assert which_weights(read_checkpoint(old), tmp_path) == "step 1, best on the validation split"
    saved(tmp_path, 3, best=3)  # step 1 was the best only until then
    text = "step 1 (best on the validation split: step 3)"
    assert which_weights(read_checkpoint(old), tmp_path) == text


@pytest.mark.parametrize(("use", "step"), [(None, 1), ("best", 1), ("last", 2)])
def test_the_best_weights_are_the_model_unless_use_says_otherwise(tmp_path, old, use, step):
    run = run_of(tmp_path)
    run.settings.use, run.settings.action = use, SimpleNamespace(trains=False, name="predict")
    assert load_checkpoint(run).step == step


def test_without_a_validation_split_the_last_weights_are_the_model(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step, best=None)
    run = run_of(tmp_path)
    run.settings.use, run.settings.action = None, SimpleNamespace(trains=False, name="predict")
    assert load_checkpoint(run).step == 2
    run.settings.use = "best"
    with pytest.raises(UserError, match=r"--use best: no checkpoint of .* is the best"):
        load_checkpoint(run)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_run_in_a_new_folder_takes_the_best_one_along(tmp_path, kept):
    """It is that of step 3; or, as the disk was full then, that of step 1."""
    for step, best in ((1, 1), (3, 3), (4, 3)):
        if step != 3 or kept == 3:
            saved(tmp_path / "one", step, best)
    run = run_of(tmp_path / "one")
    run.settings.dry_run = True  # no trackers
    run.folder = SimpleNamespace(path=tmp_path / "other")
    run.folder.checkpoints = tmp_path / "other" / "checkpoints"
    run.folder.metrics = tmp_path / "other" / "absent" / "metrics.jsonl"  # ends it here
    checkpoint = Checkpoints(tmp_path / "one" / "checkpoints").load()
    with pytest.raises(UserError):
        open_metrics(run, checkpoint, None)
    assert Checkpoints(run.folder.checkpoints).steps() == [kept, 4]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_best_one_that_is_gone_is_told_and_counted_anew(tmp_path, processes):
    gone = saved(tmp_path, 1, best=1)
    saved(tmp_path, 2, best=1)
    shutil.rmtree(gone)
    run = run_of(tmp_path, processes=processes)
    figures = load_checkpoint(run).state["progress"]
    assert figures == dict.fromkeys(BEST)
    assert run.said == [
        f"note: the best checkpoint, {gone}, is gone: the best one is counted anew from here on"
    ]


def test_the_best_one_before_takes_the_place_of_one_that_is_gone(tmp_path):
    before = saved(tmp_path, 1, best=1, best_epoch=0.5, best_val_accuracy=60.0)
    gone = saved(tmp_path, 2, best=2)
    saved(tmp_path, 3, best=2, best_epoch=1.0, best_val_accuracy=70.0)
    shutil.rmtree(gone)
    run = run_of(tmp_path)
    figures = load_checkpoint(run).state["progress"]
    assert figures == dict(zip(BEST, (1, 0.5, 60.0, None, None), strict=True))
    assert run.said == [f"note: the best checkpoint, {gone}, is gone: {before} is the best one now"]


def test_a_best_one_that_is_there_gives_no_note(tmp_path, old):
    """Under its other name."""
    run = run_of(tmp_path)
    assert load_checkpoint(run).state["progress"]["best_step"] == 1 and run.said == []


def measured(run, folder: Path) -> tuple[dict, list]:
    """What `_measure_best` returns after step 2, and the weights that it has measured."""
    loaded = []
    report = Report.__new__(Report)
    report.run, report.settings, report.say = run, run.settings, run.said.append
    report.trainer = SimpleNamespace(
        progress=SimpleNamespace(step=2, best_step=1, best_epoch=0.5, best_val_accuracy=70.0),
        saver=SimpleNamespace(store=Checkpoints(folder / "checkpoints")),
        plan=SimpleNamespace(best_by=None),
        loader=SimpleNamespace(steps_per_epoch=2),
        log=SimpleNamespace(metrics=SimpleNamespace(write=lambda **_: None)),
        steps=SimpleNamespace(strategy=SimpleNamespace(load=loaded.append)),
    )
    report._measure_test_set = lambda: Evaluation(0.5, 60.0, 10)
    figures = report._measure_best(Evaluation(1.0, 50.0, 10))
    return figures, loaded


def test_the_best_one_is_measured_under_its_other_name(tmp_path, old):
    figures, loaded = measured(run_of(tmp_path, processes=2), tmp_path)
    assert (figures.loss, figures.accuracy) == (0.5, 60.0)
    assert loaded[0]["weight"][0] == 1.0


def test_no_rank_measures_the_best_one_if_another_cannot_read_it(tmp_path, old):
    """It would wait for that rank without end."""
    run = run_of(tmp_path, exchange=Ranks(None, "model.safetensors: Input/output error"))
    assert measured(run, tmp_path) == (None, [])
    assert run.said == [
        f"the best checkpoint, {old}, cannot be measured: model.safetensors: Input/output error"
    ]


@pytest.mark.parametrize("error", [UserError, DamagedCheckpoint])
def test_a_rank_that_cannot_read_the_best_one_tells_the_others(tmp_path, old, monkeypatch, error):
    def read_checkpoint(path):
        raise error("not readable")

    told = []
    run = run_of(tmp_path, exchange=SimpleNamespace(gather_json=lambda v: [told.append(v), v]))
    monkeypatch.setattr("utils.runs.report.read_checkpoint", read_checkpoint)
    assert measured(run, tmp_path) == (None, []) and told == ["not readable"]
