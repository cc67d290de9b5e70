"""Early stopping and the plateau schedule follow the validation split, and print what they do; an
evaluation before the first step decides nothing."""

import math

import pytest
from toy import history, make_trainer

from utils.measures.table import MEASURES
from utils.optim.schedules import Plateau
from utils.training.evaluation import Evaluation
from utils.training.progress import Progress


def trainer_with(folder, accuracies, losses=None, **options):
    """A trainer whose evaluations give these figures, one after the other."""
    trainer = make_trainer(folder, val=True, epochs=len(accuracies), **options)
    figures = iter(zip(losses or [1.0] * len(accuracies), accuracies, strict=True))
    trainer.evaluate = lambda is_last: Evaluation(*next(figures), samples=10)
    return trainer


def test_training_stops_after_patience_evaluations_without_a_better_one(tmp_path, capsys):
    trainer = trainer_with(tmp_path, [10, 30, 20, 30, 25, 90], early_stop_patience=3)
    progress = trainer.fit()
    epoch = trainer.loader.steps_per_epoch
    assert progress.stopped_early and progress.step == 5 * epoch
    assert (progress.best_epoch, progress.best_val_accuracy) == (2, 30)
    assert "for 3 evaluations: stopped early" in capsys.readouterr().out
    assert {2 * epoch, 5 * epoch} <= set(trainer.saver.store.steps())


def test_a_better_evaluation_in_time_prevents_the_stop(tmp_path):
    trainer = trainer_with(tmp_path, [10, 5, 5, 11, 5, 5], early_stop_patience=3)
    progress = trainer.fit()
    assert not progress.stopped_early and progress.step == trainer.plan.total_steps
    assert progress.since_best == 2


def test_a_stopped_run_goes_on_with_more_patience(tmp_path):
    stopped = trainer_with(tmp_path, [10, 5, 5, 5, 5], early_stop_patience=1)
    stopped.fit()
    resumed = trainer_with(tmp_path, [11, 5, 5, 5, 5], early_stop_patience=4)
    resumed.restore(resumed.saver.store.load())
    assert not resumed.progress.stopped_early
    assert resumed.fit().best_epoch == 3
    longer = trainer_with(tmp_path, [10, 5, 5, 5, 5, 5], early_stop_patience=1)
    checkpoint = stopped.saver.store.load()
    assert checkpoint.step == resumed.plan.total_steps
    longer.restore(checkpoint)
    assert longer.progress.stopped_early  # since_best is 2


def test_a_run_that_has_done_all_its_steps_has_not_stopped_early(tmp_path, capsys):
    whole = trainer_with(tmp_path, [10, 5], early_stop_patience=1)
    assert not whole.fit().stopped_early and whole.progress.since_best == 1
    assert "stopped early" not in capsys.readouterr().out
    same = trainer_with(tmp_path, [10, 5], early_stop_patience=1)
    same.restore(same.saver.store.load())
    assert not same.progress.stopped_early


def test_the_note_counts_one_evaluation(tmp_path, capsys):
    trainer_with(tmp_path, [10, 5, 5], early_stop_patience=1).fit()
    assert (
        "no better accuracy or lower loss for 1 evaluation: stopped early"
        in capsys.readouterr().out
    )


def test_plateau_lowers_the_rate_and_says_so(tmp_path, capsys):
    trainer = trainer_with(
        tmp_path, [1] * 6, losses=[3, 2, 2, 2, 1, 1],
        schedule=lambda: Plateau("plateau", 0, gamma=0.5, patience=1),
    )  # fmt: skip
    trainer.fit()
    rates = [r["lr"] for r in history(tmp_path) if r.get("average_over") == "epoch"]
    assert rates == [0.05, 0.05, 0.05, 0.05, 0.025, 0.025]
    assert capsys.readouterr().out.count("the learning rate falls") == 1


def test_an_evaluation_before_the_first_step_decides_nothing(tmp_path, capsys):
    trainer = trainer_with(tmp_path / "with", [10, 20], eval_on_start=True)
    measured = iter([99, 10, 20])
    trainer.evaluate = lambda is_last: Evaluation(1.0, next(measured), samples=10)
    progress = trainer.fit()
    assert "before the first step: val loss 1.0000, accuracy 99.00 %" in capsys.readouterr().out
    assert (progress.best_epoch, progress.best_val_accuracy) == (2, 20)
    first = next(r for r in history(tmp_path / "with") if r["split"] == "val")
    assert (first["step"], first["accuracy"]) == (0, 99)
    plain = trainer_with(tmp_path / "without", [10, 20])
    plain.fit()
    losses = [
        [r["loss"] for r in history(tmp_path / name) if r["split"] == "train"]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_equal_accuracies_are_judged_by_the_loss_and_patience_lasts_while_it_falls(tmp_path):
    losses = [3.0, 2.0, 1.0, 1.5, 1.6]
    trainer = trainer_with(tmp_path, [95] * 5, losses=losses, early_stop_patience=2)
    progress = trainer.fit()
    assert progress.best_epoch == 3 and progress.best_val_loss == 1.0
    assert progress.stopped_early is False and progress.since_best == 2


@pytest.mark.parametrize(
    ("by", "epoch", "observed"), [(None, 2, "loss"), ("accuracy", 2, "error"), ("loss", 1, "loss")]
)
def test_what_the_best_is_best_by(tmp_path, monkeypatch, by, epoch, observed):
    by = by and MEASURES[by]
    trainer = trainer_with(tmp_path, [10, 30, 20], losses=[1.0, 2.0, 3.0], best_by=by)
    seen = []
    monkeypatch.setattr(trainer.steps.schedule, "observe", lambda loss: seen.append(loss))
    assert trainer.fit().best_epoch == epoch
    assert seen == ([90, 70, 80] if observed == "error" else [1.0, 2.0, 3.0])


def test_the_figures_of_older_checkpoints_are_beaten_by_the_accuracy_alone():
    progress = Progress(best_val_accuracy=50.0)
    assert progress.take_validation(50.0, 0.1) == (False, False)
    assert progress.take_validation(50.0, 0.05) == (False, True)
    assert progress.take_validation(51.0, 9.0) == (True, False)


def test_by_the_loss_a_finite_one_is_better_than_none():
    progress = Progress()
    assert progress.take_validation(50.0, float("nan"), MEASURES["loss"])[0]
    better = [progress.take_validation(50.0, loss, MEASURES["loss"])[0] for loss in (1.0, 1.2, 0.9)]
    assert better == [True, False, True]


def test_the_best_by_a_further_measure(tmp_path, monkeypatch, capsys):
    """Of equal values the one with the lower loss; one that is undefined is never better."""
    kappa = MEASURES["cohen_kappa"]
    trainer = trainer_with(tmp_path, [10] * 5, best_by=kappa)
    values, losses = iter([0.1, 0.5, 0.5, 0.5, None]), iter([1, 2, 3, 1.5, math.nan])
    trainer.evaluate = lambda is_last: Evaluation(
        next(losses), 10, 10, further={kappa: next(values)}
    )
    seen = []
    monkeypatch.setattr(trainer.steps.schedule, "observe", lambda loss: seen.append(loss))
    progress = trainer.fit()
    assert (progress.best_epoch, progress.best_val_value) == (4, 0.5)
    assert seen == [90, 50, 50, 50, math.inf]
    assert "Cohen's kappa 0.500" in capsys.readouterr().out


def test_plateau_follows_figures_below_zero():
    """As 1 minus a measure of the user's that exceeds 1."""
    schedule = Plateau("plateau", total_steps=10, patience=0, gamma=0.1)
    assert [schedule.observe(value) for value in (-5.0, -5.0, -6.0, -5.5)] == [
        False, True, False, True,
    ]  # fmt: skip
