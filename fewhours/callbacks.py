"""What a program is told while a run trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class StopTraining(Exception):
    """Raised by a callback: the run ends after this step as if it were the last one. It evaluates,
    saves and reports, with the status "stopped_early"."""


class Callback(Protocol):
    """Methods that `fewhours.train(callbacks=[...])` calls; those that an object lacks are left
    out. They are called between steps, where training waits for the device anyway, and only in the
    first process of a run. Their arguments are plain values, and what they return is ignored.

    `epoch` is the number of epochs trained, such as 1.5. `figures` are those of a line of
    metrics.jsonl (docs/run_folder.md): "loss", "accuracy", "lr", ...
    """

    def on_start(self, folder: Path, settings: dict[str, Any]) -> None:
        """Before the data are loaded. `settings`: every flag."""

    def on_log(self, step: int, epoch: float, figures: dict[str, Any]) -> None:
        """Every --log_every steps: means over them."""

    def on_epoch(self, step: int, epoch: float, figures: dict[str, Any]) -> None:
        """At the end of an epoch or of the training: means over that epoch."""

    def on_evaluation(self, step: int, epoch: float, figures: dict[str, Any]) -> None:
        """After an evaluation; figures["split"] is "val" or "test"."""

    def on_end(self, run: Any) -> None:
        """At the end, also when Ctrl-C has interrupted the run: the `fewhours.Run`."""


class Callbacks:
    """A tracker (see utils/reporting/trackers.py) that calls them.

    An exception in a callback ends the run; a note in it names the callback.
    """

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks: Sequence[Callback] = callbacks
        self._run: Any = None  # until it starts

    def start(self, run) -> None:
        """`run`: a utils.runs.run.Run that is about to train."""
        self._run = run
        run.trackers.append(self)
        self._call("on_start", run.folder.path, dict(vars(run.settings)))

    def log(self, record: dict[str, Any]) -> None:
        figures = dict(record)
        split, over = figures["split"], figures.pop("average_over", None)
        names = {"train": "on_log" if over == "steps" else "on_epoch"}
        names |= dict.fromkeys(("val", "test"), "on_evaluation")
        if split in names:
            self._call(names[split], figures.pop("step"), figures.pop("epoch"), figures)

    def end(self, run) -> None:
        """`run`: a fewhours.Run that has ended."""
        if self._run is not None:
            self._call("on_end", run)

    def close(self) -> None:
        pass

    def _call(self, method: str, *values) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                getattr(callback, method, _nothing)(*values)
            except StopTraining as stop:
                self._run.agreed_signal.wants_end = True
                self._run.console.say(f"{name} ends the training{': ' * bool(str(stop))}{stop}")
            except Exception as error:
                error.add_note(
                    f"{name}, a callback of fewhours.train, has failed. Nothing after the last "
                    "checkpoint is saved; fewhours.train(resume=FOLDER) goes on from there."
                )
                raise


def _nothing(*values) -> None:
    """Takes the place of a method that a callback lacks."""
