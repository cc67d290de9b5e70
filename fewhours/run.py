"""`fewhours.train` and `fewhours.load`: runs from Python, by the code that the commands start."""

import csv
import heapq
import os
import signal
import tempfile
import time as clock
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.launch.signals import Signals, StoppedBySignal
from utils.machine.packages import mendable
from utils.place import as_called, import_entry
from utils.reporting.run_folder import EVALUATED, PAGE, REPORT
from utils.settings.actions import ACTIONS
from utils.start.command import as_entry

from .callbacks import Callback, Callbacks
from .state import process_left_as_it_was

StrPath = str | os.PathLike[str]
Row = dict[str, Any]  # of a table of answers, by column
# Flags of the commands that do not train.
OTHERS = {n for a in ACTIONS for n in (a.name, *a.options, *a.implied_by)} - {"train"}
OTHERS |= {"gpu_ids", "help", "version"}


class Run:
    """A run: what its folder has.

    Args:
        folder: of the run.

    Attributes:
        folder: its path.

    Raises:
        UserError: the folder holds no run.
    """

    def __init__(self, folder: StrPath):
        self.folder = Path(folder)
        if not _is_run(self.folder):
            raise UserError(f"{self.folder}: there is no config.yaml in it, so it is no run")

    def __repr__(self) -> str:
        named = " on ".join(self.summary[n] for n in ("model", "dataset") if n in self.summary)
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.2f} %"
        return f"<Run {self.folder}: {named or 'no summary'}, {self.status}{accuracy}>"

    @cached_property
    def _recorded(self):
        from utils.reporting.recorded import read_runs  # imports NumPy

        return read_runs([self.folder])[0]

    @property
    def status(self) -> str:
        """ "finished", "stopped_early" or "interrupted"; "unfinished" without a summary."""
        return self.summary.get("status", "unfinished")

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json has (docs/run_folder.md); empty if the run was killed."""
        return self._recorded.summary

    @property
    def metrics(self) -> dict[str, Any]:
        """{"accuracy": per cent, "loss": ..., "samples": ..., "split": ...} and the measures of
        --metrics, of the run's model on the test set; if that was not measured, those of the last
        evaluation; empty if there was none."""
        return self._recorded.result

    @property
    def accuracy(self) -> float | None:
        """Per cent of the samples that `metrics` is about."""
        return self.metrics.get("accuracy")

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was measured while it trained: the lines of metrics.jsonl."""
        return self._recorded.records

    @property
    def report(self) -> Path | None:
        """report.html, the result on one page; None if there is none, as with `report=False`."""
        page = self.folder / PAGE
        return page if page.is_file() else None

    def mistakes(self, most: int = 10) -> list[Row]:
        """The samples that the model got wrong, those first of which it was surest.

        Returns:
            for each a row of evaluated.csv: "file" of a picture or "text", "true" and "predicted"
            class, "probability" of the predicted one and "p_..." of each, from 0 to 1, "loss".

        Raises:
            UserError: the answers were not written.
        """
        return surest_mistakes(self.answers(), most)

    def answers(self) -> Iterator[Row]:
        """The rows of evaluated.csv: the answer to each sample that was measured at the end.

        Raises:
            UserError: the answers were not written.
        """
        paths = [self.folder / EVALUATED, self.folder / REPORT / EVALUATED]
        for path in paths:
            if path.is_file():
                return read_answers(path)
        call = as_called(f"python {self._entry()}.py --resume {self.folder} --eval_only --report")
        raise UserError(f"{paths[0]}: there is no such file; `{call}` writes one in {REPORT}/")

    def predict(self, source: StrPath, **flags: Any) -> list[Row]:
        """Classifies new pictures (a file, a folder or a list of them) or texts (a table).

        Args:
            flags: of the command, such as `batch_size`. `predictions="FILE.csv"` keeps the table.

        Returns:
            a row for each: "file", or "line" and "text"; "predicted", the class; "probability" and
            "p_..." of each class, from 0 to 1. The values of a picture that `on_bad="skip"` leaves
            out are "".

        Raises:
            UserError: they cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="predictions-") as folder:
            table = flags.setdefault("predictions", os.path.join(folder, "predictions.csv"))
            self._use(predict=source, **flags)
            return [*read_answers(table)]

    def export(self, to: str = "onnx", **flags: Any) -> Path:
        """Writes the model for use elsewhere; returns the file, in the run's folder.

        Args:
            to: "onnx" or "safetensors".

        Raises:
            UserError: a package is missing, or the model cannot be exported.
        """
        self._use(export=to, **flags)
        return self.folder / "export" / f"model.{to}"

    def _entry(self) -> str:
        return as_entry(["--resume", str(self.folder)])[0]

    def _use(self, **flags: Any) -> None:
        _carry_out(["--resume", str(self.folder), *words_of(flags)])


def load(folder: StrPath) -> Run:
    """A run that was trained before, by `train` or by a command.

    Raises:
        UserError: the folder holds no run.
    """
    return Run(folder)


def train(
    data: StrPath | None = None,
    time: str | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    **flags: Any,
) -> Run:
    """Trains in this process, as the command with the same flags does, with the same bits.

    Ctrl-C finishes the step, saves, and returns the run with the status "interrupted";
    `train(resume=run.folder)` goes on with it. A second one raises KeyboardInterrupt.

    Args:
        data: a folder with one of pictures for each class, a table of texts, or the name of a data
            set, such as "shapes" or "cifar10"; None with `resume`.
        time: for everything, such as "90s", "10m" or "2h"; default: "10m", unless `epochs` or
            `max_steps` say how long.
        callbacks: are told what was measured while it trains (see Callback).
        flags: any of the commands (docs/flags.md), by its name: a text or a number, True or False
            for a switch, a list for several values, None to unset it.

    Raises:
        UserError: a flag or the data are wrong; its text says what to do.
        KeyboardInterrupt: before the first step, when there is nothing to save.
    """
    if other := next((name for name in flags if name in OTHERS), None):
        raise UserError(f"fewhours.train trains, and --{other} does not: use a Run, or the command")
    if data is None and "resume" not in flags:
        raise UserError("fewhours.train: name the data first, such as a folder, or a run by resume")
    words = [] if data is None else [os.fspath(data)]
    words += [*words_of({"time": time} if time else {}), *words_of(flags)]
    told = Callbacks(callbacks)
    folder = _carry_out(words, told)
    assert folder is not None  # it trains
    told.end(run := Run(folder))
    return run


def _carry_out(argv: list[str], callbacks: Callbacks | None = None) -> Path | None:
    """Carries out a command line of `fewhours`; returns the folder of the run if that trains."""

    def carry(argv: list[str], *more) -> int:
        name, words = as_entry(argv)
        return import_entry(name).ENTRY.carry_out(words, *more)

    return carried_out(carry, argv, callbacks)


def carried_out(
    carry: Callable[..., int], argv: list[str], callbacks: Callbacks | None = None
) -> Path | None:
    """Calls `carry(argv, signals, started, began)`, which raises what is to be told, and leaves the
    process as it was; returns the folder of the run if that trains."""
    started, folders = clock.monotonic(), list[Path]()

    def began(run) -> None:
        if run.folder is not None:
            folders.append(run.folder.path)
        if callbacks is not None and run.leads:
            callbacks.start(run)

    try:
        with process_left_as_it_was():
            carry(argv, Signals(may_end=False), started, began)
    except StoppedBySignal as stopped:
        print(stopped.line, flush=True)
        if (number := stopped.exit_code - 128) != signal.SIGINT:
            signal.raise_signal(number)  # has its usual effect
        if not (folders and _is_run(folders[0])):
            raise KeyboardInterrupt from None
    except Exception as error:
        if (told := mendable(error)) is None or told is error:
            raise
        raise told from error
    return folders[0] if folders else None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def words_of(flags: dict[str, Any]) -> list[str]:
    """As words of a command line."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            texts = ("none" if one is None else str(one) for one in values)
            words.append(f"--{name}={','.join(texts)}")
    return words


def read_answers(path: StrPath) -> Iterator[Row]:
    """The rows of a table of answers, with numbers for probabilities and losses."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        columns = next(rows)
        answers = columns[columns.index("predicted") :]
        numbers = [name for name in answers if not name.startswith("predicted")]
        for cells in rows:
            row = dict(zip(columns, cells, strict=True))
            yield row | {name: float(row[name]) for name in numbers if row[name]}


def surest_mistakes(rows: Iterable[Row], most: int) -> list[Row]:
    wrong = (row for row in rows if row["predicted"] != row["true"])
    return heapq.nlargest(most, wrong, key=lambda row: row["probability"])
