"""Common to trackers: names of charts, values that are no figures, a missing package."""

import sys

from trackers_records import window

from utils.reporting.trackers import TensorBoard, figures


def test_names_of_the_charts():
    record = window(3, loss=1.0, lr=0.1, accuracy=50, skipped_steps=0)
    assert figures(record) == {
        "loss/train_steps": 1.0,
        "accuracy/train_steps": 50.0,
        "skipped_steps/train_steps": 0.0,
        "lr": 0.1,
    }
    ended = {"step": 3, "epoch": 1.0, "split": "train", "average_over": "epoch"}
    ended |= {"loss": 1.0, "time_share": {"data": 0.25, "other": None}}
    assert figures(ended) == {"loss/train": 1.0, "time_share/data": 0.25}
    test = {"step": 3, "epoch": 1.0, "split": "test", "loss": 2.0, "samples": 100}
    assert figures(test) == {"loss/test": 2.0}
    assert figures(test | {"model": "average"}) == {"loss/test_average": 2.0}


def test_values_that_are_no_figures_are_left_out():
    nothing = {"a": None, "b": float("nan"), "c": float("inf"), "d": "text", "e": True, "f": [1.0]}
    assert figures(window(1, **nothing)) == {}
    assert figures({"step": 1, "epoch": 0.1, "split": "event", "event": "unfrozen"}) == {}


def test_without_the_package_a_note_says_that_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = []
    tracker = TensorBoard(tmp_path / "tensorboard", warn=said.append)
    tracker.log(window(3, loss=1.0))
    tracker.close()
    (note,) = said
    assert note.startswith("note: ") and note.endswith(": pip install tensorboard")
    assert not list(tmp_path.iterdir())
