"""Runs as their folders tell of them: settings, figures and curves, also of unfinished runs."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..measures.compute import Interval, wilson_interval

CONFIG = "config.yaml"
# Settings that say which samples a figure is about; of folders and files the end of the path.
OF_THE_DATA = ("dataset", "data_dir", "test_file", "label_column", "test_fraction")
OF_VALIDATION = ("val_fraction", "val_file", "val_is_validation")


@dataclass
class RecordedRun:
    """A run as its files have it; `name` tells it from the others that are read, `settings` are
    {name: (value in words, where it came from)}, `summary` is empty without one."""

    name: str
    settings: dict[str, tuple[str, str]]
    summary: dict
    records: list[dict]

    @property
    def state(self) -> str:
        return self.summary.get("status", "no summary: running or killed").replace("_", " ")

    @property
    def is_complete(self) -> bool:
        return self.state in ("finished", "stopped early")

    def setting(self, name: str) -> str:
        return self.settings.get(name, ("–", ""))[0]

    @cached_property
    def evaluations(self) -> list[dict]:
        """The records of evaluations while it trained: of the validation split, if there is one."""
        tests = [r for r in self.records if r.get("split") == "test" and not r.get("model")]
        return [r for r in self.records if r.get("split") == "val"] or tests

    @cached_property
    def result(self) -> dict:
        """{"split", "samples" and measures} of the run's model on the test set; if that was not
        measured, the record of the last evaluation; else empty."""
        prefix = "best_test_" if self.summary.get("model_weights") == "best" else "test_"
        if self.summary.get(f"{prefix}accuracy") is None:
            return self.evaluations[-1] if self.evaluations else {}
        own = {k.removeprefix(prefix): v for k, v in self.summary.items() if k.startswith(prefix)}
        return own | {"split": "test", "samples": self.summary["test_samples"]}

    def interval(self, measure: str) -> Interval | None:
        """The 95 % interval of the result: the run's own, else Wilson's for the accuracy."""
        own = (self.summary.get("model_test_intervals") or {}).get(measure)
        if own or measure != "accuracy" or self.result.get(measure) is None:
            return own
        samples = self.result["samples"]
        return wilson_interval(self.result[measure] / 100 * samples, samples)

    @cached_property
    def measured_on(self) -> dict[str, str]:
        """The same in all runs whose results are comparable, as far as settings tell."""
        names = OF_THE_DATA + (OF_VALIDATION if self.result.get("split") == "val" else ())
        told = {name: Path(self.setting(name)).name for name in names if name in self.settings}
        return told | {name: str(self.result.get(name)) for name in ("split", "samples")}

    def minutes(self, epochs: Sequence[float]) -> list[float]:
        """Minutes of training until these epochs, by the speeds of the log lines; empty if they are
        unknown, as without a summary, which alone has the number of samples."""
        steps = [r for r in self.records if r.get("average_over") == "steps"]
        lines = [r for r in steps if r.get("samples_per_second")]
        if not lines or "train_samples" not in self.summary:
            return []
        ends = np.array([0.0, *(r["epoch"] for r in lines)])
        laps = np.diff(ends) / [60 * r["samples_per_second"] for r in lines]
        laps *= self.summary["train_samples"]
        return np.interp(epochs, ends, [0.0, *laps.cumsum()]).tolist()


def read_runs(given: Sequence[Path]) -> list[RecordedRun]:
    """The runs that are given, and those in folders that are given, such as a search: of the stages
    of a trial the last one counts. They are named by what their paths do not share.

    Raises UserError: there are none, or a file is not as a run writes it.
    """
    folders: dict[Path, None] = {}
    for folder in given:
        runs = {}
        for where, inside, files in os.walk(folder.resolve()):
            inside.sort()
            if CONFIG in files:
                inside.clear()  # wandb's files further below have a config.yaml, too
                runs[re.sub(r"/rung\d+$", "", where)] = Path(where)
        if not runs:
            missing = f"there is no {CONFIG} in it" if folder.is_dir() else "no such folder"
            raise UserError(f"{folder}: {missing}; name runs, or folders of runs")
        folders |= dict.fromkeys(runs.values())
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [_read(folder, os.path.relpath(folder, shared)) for folder in folders]


def _read(folder: Path, name: str) -> RecordedRun:
    summary, records = {}, []
    with contextlib.suppress(OSError, ValueError):  # it runs, or the disk was full
        summary = json.loads((folder / "summary.json").read_bytes())
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                records.append(json.loads(line))
    return RecordedRun(name, _read_settings(folder / CONFIG), summary, records)


def _read_settings(path: Path) -> dict[str, tuple[str, str]]:
    """`RecordedRun.settings` from the config.yaml of a run, with the script as the first."""
    import yaml

    text, values = path.read_text(encoding="utf-8", errors="replace"), None
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
        values = yaml.safe_load(text)
    if not isinstance(values, dict) or "seed" not in values:
        raise UserError(f"{path}: these are not the settings of a run; name runs")
    origins = dict(re.findall(r"^(\w+):.*  # (.+)$", text, re.M))
    words = {"None": "not set", "True": "on", "False": "off"}
    return {"script": (text.partition("\n")[0].removeprefix("# "), "")} | {
        name: (words.get(str(value), str(value)), origins.get(name, ""))
        for name, value in values.items()
    }
