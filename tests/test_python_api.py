"""fewhours.train, fewhours.load and what a run has, within this process."""

import json
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from patience import wait_until
from PIL import Image
from quick_runs import handlers_put_back, quick, raise_in_step

import fewhours
import resnet50_test
from fewhours import state
from fewhours.run import read_answers

DOCS = Path(__file__).resolve().parents[1] / "docs" / "python.md"
TINY = {"width": 4, "batch_size": 32, "max_steps": 2, "device": "cpu", "baseline": False}


@pytest.fixture
def here(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_that_of_the_command(here, capsys):
    run = fewhours.train("shapes", output="python", time="1h", flip_test=False, **TINY)
    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("python res"))
    words = shlex.split(line.replace("--output=python", "--output=command"))[2:]
    with handlers_put_back():
        assert resnet50_test.main(words) == 0
    same = fewhours.load("command")
    for name in ("checkpoints/step-00000002/model.safetensors", "evaluated.csv"):
        assert (run.folder / name).read_bytes() == (same.folder / name).read_bytes()
    assert run.status == "finished" and run.metrics == same.metrics
    assert run.accuracy == run.summary["test_accuracy"] and run.history[-1]["split"] == "test"
    assert run.report == Path("python/report.html") and f"{run.accuracy:.2f} %>" in repr(run)
    mistakes = run.mistakes(3)
    sure = [row["probability"] for row in mistakes]
    assert len(sure) == 3 and sorted(sure, reverse=True) == sure
    assert all(row["true"] != row["predicted"] for row in mistakes)


def facts() -> list:
    return [
        [signal.getsignal(number) for number in state._SIGNALS], sys.unraisablehook, {**os.environ},
        [*sys.path], torch.get_num_threads(), torch.get_rng_state().tolist(), torch.optim.SGD.step,
        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
    ]  # fmt: skip


def test_nothing_is_left_behind(here, monkeypatch, capsys):
    state._say_what_is_too_late.cache_clear()
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before, threads = facts(), {*threading.enumerate()}
    more = {"threads": 2, "deterministic": True, "report": False}
    fewhours.train("shapes", **TINY | more)
    assert facts() == before
    with pytest.raises(fewhours.UserError):
        fewhours.train("shapes", epocs=3)
    assert facts() == before
    wait_until(lambda: {*threading.enumerate()} <= threads)
    assert capsys.readouterr().out.count("starts with GOMP_SPINCOUNT=10000") == 1


def test_ctrl_c_saves(here, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        raise_in_step(patch, 1, signal.SIGINT)
        run = fewhours.train("shapes", **TINY)
    assert run.status == "interrupted" and run.summary["steps"] == 1
    assert "saved; resume with --resume runs/" in capsys.readouterr().out
    run = fewhours.train(resume=run.folder)
    assert run.status == "finished" and run.summary["steps"] == 2
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raise_in_step(patch, 1, signal.SIGINT, signal.SIGINT)  # twice: at once
        fewhours.train("shapes", **TINY)


def test_a_signal_that_ends_the_process_still_does(here, monkeypatch):
    arrived: list = []
    monkeypatch.setattr(signal, "raise_signal", arrived.append)
    stop = "utils.launch.signals.AgreedSignal.poll"
    monkeypatch.setattr(stop, lambda self, due=False: setattr(self, "signum", signal.SIGTERM))
    assert fewhours.train("shapes", **TINY).status == "interrupted"
    assert arrived == [signal.SIGTERM]


def test_numbers_of_a_table(tmp_path):
    """Columns of the user's own stay texts."""
    table = tmp_path / "predictions.csv"
    table.write_text(
        "\ufeffp_id,loss,predicted,probability,p_a\nx,none,a,0.75,0.75\ny,1,,,\n", "utf-8"
    )
    assert [*read_answers(table)] == [
        {"p_id": "x", "loss": "none", "predicted": "a", "probability": 0.75, "p_a": 0.75},
        {"p_id": "y", "loss": "1", "predicted": "", "probability": "", "p_a": ""},
    ]


class Recorder:
    """A callback without on_log."""

    def __init__(self, stops_in: str = "", error: type[Exception] = fewhours.StopTraining):
        self.calls: list = []
        self.stops_in, self.error = stops_in, error

    def _told(self, name: str, *values) -> None:
        self.calls.append((name, *values[:2]))
        if name == self.stops_in:
            raise self.error("enough")

    def __getattr__(self, name: str):
        if name in ("on_start", "on_epoch", "on_evaluation", "on_end"):
            return lambda *values: self._told(name, *values)
        raise AttributeError(name)


def test_callbacks(here, capsys):
    more = TINY | {"max_steps": None, "epochs": 2, "batch_size": 200, "report": False}
    whole, stops, fails = Recorder(), Recorder("on_evaluation"), Recorder("on_epoch", OSError)
    logs: list = []

    class OnlyLog:
        def on_log(self, step, epoch, figures):
            logs.append((step, figures["loss"]))
            if len(logs) == 2 and not whole.calls:
                raise fewhours.StopTraining

    stopped = fewhours.train("shapes", callbacks=[OnlyLog()], log_every=1, **more)
    assert stopped.status == "stopped_early" and stopped.summary["steps"] == logs[1][0] == 2
    assert stopped.history[-1]["step"] == 2 and "accuracy" in stopped.history[-1]
    run = fewhours.train(resume=stopped.folder, callbacks=[whole])
    assert run.status == "finished" and run.summary["epochs"] == 2
    names = [name for name, *_ in whole.calls]
    assert names == ["on_start", *["on_epoch", "on_evaluation"] * 2, "on_end"]
    assert whole.calls[0][1] == stopped.folder and whole.calls[-2][1:] == (6, 2.0)
    run = fewhours.train("shapes", callbacks=[stops], **more)
    assert run.status == "stopped_early" and run.summary["epochs"] == 1
    assert "Recorder.on_evaluation ends the training: enough" in capsys.readouterr().out
    with pytest.raises(OSError, match="enough") as caught:
        fewhours.train("shapes", callbacks=[fails], **more)
    assert "Recorder.on_epoch, a callback of" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fewhours.train("nowhere"), "nowhere: there is no such folder or file"),
        (lambda: fewhours.train("shapes", epocs=3), "unknown flag --epocs, did you mean --epochs?"),
        (lambda: fewhours.train("shapes", predict="x"), "--predict does not: use a Run"),
        (lambda: fewhours.train(), "name the data first"),
        (lambda: fewhours.load("nowhere"), "no config.yaml in it"),
        (lambda: fewhours.Ensemble(["nowhere"]), "no config.yaml in it"),
        (lambda: fewhours.Ensemble([]), "name its runs"),
    ],
)
def test_mistakes(call, told, here):
    with pytest.raises(fewhours.UserError, match=re.escape(told)):
        call()


def test_the_page_about_python(here, monkeypatch, capsys):
    for folder in ("my_pictures/red", "my_pictures/blue", "new_pictures"):
        Path(folder).mkdir(parents=True)
        for number in range(20):
            colour = (number, 0, 200) if "blue" in folder else (200, 0, number)
            Image.new("RGB", (32, 32), colour).save(f"{folder}/{number}.png")
    train = fewhours.train
    quickly = TINY | {"test_fraction": 0.5, "lr": 1e-9, "epochs": 2, "max_steps": None}

    def train_quickly(*data, time=None, **flags):
        return train(*data, **({} if "resume" in flags else quickly) | flags)

    monkeypatch.setattr(fewhours, "train", train_quickly)
    names: dict = {}
    for block in re.findall(r"```python\n(.+?)```", DOCS.read_text(), re.S):
        exec(block, names)
    said, run = capsys.readouterr().out, names["run"]
    assert "--epochs: '0' is not a whole number of 1 or more" in said
    assert "new_pictures/0.png" in said and "my_pictures" in said
    assert run.summary["epochs"] == 5 and names["path"].is_file()
    ensemble, rows = names["ensemble"], names["rows"]
    assert len(ensemble.runs) == 3 and ensemble.metrics["samples"] == 20
    alone = [each.predict("new_pictures") for each in ensemble.runs]
    mean = sum(rows[0]["p_red"] for rows in alone) / 3
    assert len(rows) == 20 and rows[0]["p_red"] == pytest.approx(mean, abs=1e-9)
    ensemble.predict("new_pictures", predictions="together.csv")
    (row, *others) = read_answers("together.csv")
    assert len(others) == 19 and row["p_red"] == pytest.approx(mean, abs=1e-6)
    with pytest.raises(fewhours.UserError, match="would replace together"):
        ensemble.predict("together.csv", predictions="together.csv")


def test_the_notebook(here, monkeypatch, capsys):
    """Its code, cell by cell; no output is stored in it."""
    pages = json.loads(DOCS.with_name("first_run.ipynb").read_text())["cells"]
    cells = [cell for cell in pages if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    train, names = fewhours.train, {"__name__": "__main__"}

    def train_quickly(data, time=None, epochs=1, **flags):
        return train(
            data, **TINY | {"max_steps": None, "epochs": epochs, "batch_size": 200} | flags
        )

    monkeypatch.setattr(fewhours, "train", train_quickly)
    for cell in cells:
        exec("".join(cell["source"]), names)
    said, run = capsys.readouterr().out, names["run"]
    assert "taken for" in said and "after 3 steps" in said and run.accuracy > 90
