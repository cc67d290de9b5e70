"""Time fractions of an epoch's phases, and advice if one takes much of it."""

import time

import pytest
import torch
from toy import history, make_trainer

from utils.checkpoints.checkpoint import Checkpoints
from utils.training.times import PHASES, PhaseTimes


def test_time_belongs_to_the_mark_at_its_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = PhaseTimes(torch.device("cpu"))
    times.mark("other")
    for phase, seconds in (("data", 1), ("forward_backward", 5), ("data", 1), ("optimizer", 1)):
        now[0] += seconds
        times.mark(phase)
        times.read()
    now[0] += 2
    times.mark("evaluation")
    assert times.fractions() == {
        "data": 0.2, "forward_backward": 0.5, "optimizer": 0.1, "checkpoint": 0.0,
        "evaluation": 0.2, "other": 0.0,
    }  # fmt: skip
    now[0] += 3
    times.mark("checkpoint")
    assert times.fractions()["checkpoint"] == 1.0  # counted from zero again


def test_every_epoch_reports_its_time_fractions(tmp_path):
    import json

    make_trainer(tmp_path, save_steps=3).fit()
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    epochs = [r for r in records if r.get("average_over") == "epoch"]
    assert len(epochs) == 3
    for record in epochs:
        shares = record["time_share"]
        assert set(shares) == {*PHASES, "other"}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert shares["forward_backward"] > 0 and shares["evaluation"] > 0
        assert record["peak_memory_bytes"] > 0
    assert "time_share" not in history(tmp_path)[-2]


def test_advice_is_given_once_for_the_phase_that_dominates(tmp_path, capsys):
    trainer = make_trainer(tmp_path, advice={"evaluation": "do A", "checkpoint": "do B"})

    def slow(is_last, real=trainer.evaluate):
        time.sleep(0.2)
        return real(is_last)

    trainer.evaluate = slow
    trainer.fit()
    said = capsys.readouterr().out
    assert said.count("% of the time: do A") == 1 and "do B" not in said


def test_after_the_last_epoch_it_is_too_late_to_evaluate_less_often(tmp_path, capsys):
    log = make_trainer(tmp_path, advice={"evaluation": "do A", "checkpoint": "do B"}).log
    log.advise({"evaluation": 0.5, "checkpoint": 0.5}, is_last=True)
    said = capsys.readouterr().out
    assert "do B" in said and "do A" not in said


def test_a_part_of_an_epoch_gives_no_advice(tmp_path, capsys):
    """Resumed near its end, the first epoch would seem to be evaluation above all."""
    make_trainer(tmp_path, save_steps=1, max_steps=4, epochs=1).fit()
    checkpoint = Checkpoints(tmp_path / "checkpoints").load()
    assert checkpoint.step == 4
    resumed = make_trainer(tmp_path, epochs=3, advice={"evaluation": "do A"})
    resumed.restore(checkpoint)
    resumed.evaluate = lambda last, real=resumed.evaluate: (time.sleep(0.2), real(last))[1]
    capsys.readouterr()
    resumed.fit()
    lines = capsys.readouterr().out.splitlines()
    (advice,) = (number for number, line in enumerate(lines) if "do A" in line)
    assert sum("test loss" in line for line in lines[:advice]) == 2
