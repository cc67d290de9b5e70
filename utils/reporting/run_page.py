"""report.html: what a run has found, in one file that needs no network."""

import base64
import io
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from ..machine.packages import is_installed
from ..measures.findings import Doubt, Mistake, find
from ..measures.outcomes import Outcomes
from ..measures.table import MEASURES, Measure, known_measure
from ..place import as_called
from ..plural import counted
from .answers import SampleNames
from .classes import CLASSES_WITH_NUMBERS, class_rows, confusions
from .console import duration
from .page import COLOURS, plot, write_page
from .recorded import RecordedRun, read_runs
from .run_folder import PAGE

SHOWN, DOUBTS, COPIES = 24, 12, 12  # mistakes, doubtful labels, pairs that are nearly the same
SIDE = 128  # pixels of the longer side of a picture
LISTED = 200  # classes in the table of classes, the worst ones of more
CONFUSIONS = 12  # of many classes, the most frequent ones
LONGEST = 600  # characters of a text
# In the order in which they are told; names of phases in `time_share`.
PHASES = {
    "forward_backward": "forward and backward", "optimizer": "optimizer",
    "data": "waiting for data",
    "evaluation": "evaluation", "checkpoint": "checkpoints", "other": "other",
}  # fmt: skip
SPLITS = {"test": "test", "val": "validation", "train": "training"}


@dataclass(frozen=True)
class Seen:
    """What a page tells of the data.

    Attributes:
        names, labels: by split, "train", "val" or "test"; labels are (samples,) int64.
        split: the one that the run was measured on.
        notes: lines for the user.
        copies: (sample of `split`, training sample) that are nearly the same.
        batch: draws the first training batch: pictures as of SampleNames, or texts.
    """

    names: Mapping[str, SampleNames]
    labels: Mapping[str, np.ndarray]
    split: str
    notes: Sequence[str]
    copies: Sequence[Sequence[int]]
    batch: Callable[[], Iterable]


def write_run_page(
    folder: Path, title: str, classes: Sequence[str], outcomes: Outcomes, seen: Seen,
    doubts: Sequence[Doubt] = (),
) -> None:  # fmt: skip
    """Writes report.html into the folder of a run, whose summary, metrics and log are there.

    Args:
        outcomes: of the split that the run was measured on.
        doubts: its samples with doubtful labels, which labels_to_check.csv lists.

    Raises:
        OSError: a file cannot be read or written.
        UserError: likewise.
    """
    (run,) = read_runs([folder])
    drawn = is_installed("matplotlib")
    findings, names = find(outcomes, SHOWN), seen.names[seen.split]
    confused = [] if findings.matrix is None else confusions(findings.matrix, CONFUSIONS)
    mistakes, doubtful = _shown((findings.mistakes, doubts[:DOUBTS]), names, classes, folder)
    context = {
        "title": title,
        "result": _result(run, "picture" if names.picture else "text"),
        "baselines": _baselines(run),
        "wins": run.summary.get("baseline_wins"),
        "mistakes": mistakes,
        "doubts": doubtful,
        "doubt_count": counted(len(doubts), "label"),
        "labels": shlex.quote(str(folder / "corrected.csv")) if "file" in names.columns else "",
        "copies": _copies(seen, classes, folder),
        "copied": f"{len(seen.copies):,}",
        "found": [*_splits(seen.labels, classes), *seen.notes],
        "batch": [data_address(one) if names.picture else one for one in seen.batch()],
        "pictures": names.picture is not None,
        "matrix": _matrix(findings.matrix, classes),
        "confusions": [(classes[i], classes[j], times) for i, j, times in confused],
        "classes": _classes(findings.matrix, classes),
        "curves": _curves(run) if drawn else [],
        "calibration": _calibration(findings.bins) if drawn else None,
        "phases": _phases(run),
        "notes": [line for line in _notes(folder / "log.txt") if line not in seen.notes],
        "settings": [
            (name, value, origin)
            for name, (value, origin) in run.settings.items()
            if origin not in ("default", "") and name not in ("output", "config")
        ],
        "weights": "The run's model" if "model_weights" in run.summary else "The last weights",
        "command": _command(run, folder),
        "facts": _facts(run),
    }
    write_page(folder / PAGE, "report.html", **context)


# ---- the result ---------------------------------------------------------------------------------


def _figure(measure: Measure, value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.2f} %" if measure.percent else f"{value:.3f}"


def _result(run: RecordedRun, kind: str) -> dict:
    """Of the run's model: what it was measured on, its measures and their intervals.

    Args:
        kind: a noun for a sample.
    """
    found, rows = run.result, []
    measures = [one for one in map(known_measure, found) if one is not None]
    for measure in sorted(measures, key=lambda one: (one.name != "accuracy", one.name == "loss")):
        interval, digits = run.interval(measure.name), 1 if measure.percent else 3
        ends = "" if not interval else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"
        rows.append((measure.title, _figure(measure, found[measure.name]), ends))
    (_, accuracy, interval_of_it), *_ = rows
    return {
        "rows": rows,
        "samples": counted(found["samples"], f"{SPLITS[found['split']]} {kind}"),
        "accuracy": accuracy,
        "interval": interval_of_it,
    }


def _baselines(run: RecordedRun) -> list[tuple[str, ...]]:
    """(name, accuracy and, if it is shown, macro F1) of the run's model and of simple methods."""
    found = [run.summary.get(name) for name in ("baseline", "majority")]
    rows = [(one["name"], one) for one in found if one]
    measures = [MEASURES[name] for name in ("accuracy", "f1_macro") if name in run.result]
    return [
        (name, *(_figure(measure, one.get(measure.name)) for measure in measures))
        for name, one in ([("this run's model", run.result), *rows] if rows else [])
    ]


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    summary = run.summary
    weights = {
        "best": "the best on the validation split", "last": "the last",
        "average": "the moving average",
    }.get(summary.get("model_weights", ""), "the last")  # fmt: skip
    speed = summary.get("samples_per_second")
    facts = {
        "weights": f"{weights}, of step {summary.get('model_step', summary['steps']):,}",
        "trained on": f"{summary['train_samples']:,} samples of {summary['classes']:,} classes",
        "length": f"{summary['epochs']:.3g} epochs, {counted(summary['steps'], 'step')} of "
        f"{counted(summary['global_batch_size'], 'sample')}",
        "time": f"{duration(summary['seconds_training'])} of training, "
        f"{duration(summary['seconds_total'])} in all"
        + (f"; {speed:,.0f} samples a second" if speed else ""),
        "on": f"{summary['device']}, {summary['precision']}, "
        f"{counted(summary['world_size'], 'process')}",
    }
    return [*facts.items()]


def _command(run: RecordedRun, folder: Path) -> str:
    processes, script = run.summary.get("world_size", 1), run.setting("script")
    start = f"NPROC={processes} bash run_distributed.sh" if processes > 1 else "python"
    config, again = (shlex.quote(str(path)) for path in (folder / "config.yaml", f"{folder}-again"))
    return as_called(f"{start} {script} --config {config} --output {again}")


# ---- mistakes -----------------------------------------------------------------------------------


def _shown(
    lists: Sequence[Sequence[Mistake]], names: SampleNames, classes: Sequence[str], folder: Path
) -> list[list[dict]]:
    """What the page shows of each sample: its picture or text, its name, and a link to its file."""
    wanted = {mistake.sample for mistakes in lists for mistake in mistakes}
    cells = {place: found for place, found in enumerate(names.cells()) if place in wanted}
    texts = enumerate(names.texts()) if names.texts else ()
    text_of = {place: found for place, found in texts if place in wanted}

    def row(mistake: Mistake) -> dict:
        what = dict(zip(names.columns, cells[mistake.sample], strict=True))
        told = [f"{name} {value}" for name, value in what.items() if name != "file"]
        link, path = None, what.get("file")
        if path is not None:
            told.insert(0, os.sep.join(Path(path).parts[-2:]))
            if os.path.exists(path):  # relative, so that the folders may be moved together
                relative = os.path.relpath(os.path.realpath(path), folder.resolve())
                link = quote(os.fsencode(relative))
        text = text_of.get(mistake.sample)
        if text is not None and len(text) > LONGEST:
            text = f"{text[:LONGEST]} …"
        return {
            "name": ", ".join(told), "link": link, "text": text,
            "picture": names.picture and data_address(names.picture(mistake.sample)),
            "true": classes[mistake.true], "predicted": classes[mistake.predicted],
            "sure": f"{100 * mistake.probability:.1f} %",
        }  # fmt: skip

    return [[row(mistake) for mistake in mistakes] for mistakes in lists]


# ---- data ---------------------------------------------------------------------------------------


def _copies(seen: Seen, classes: Sequence[str], folder: Path) -> list[tuple[dict, ...]]:
    """What the page shows of near copies, (evaluated, training sample), those of two classes
    first."""
    splits, labels = (seen.split, "train"), seen.labels
    pairs = sorted(seen.copies, key=lambda p: labels[splits[0]][p[0]] == labels["train"][p[1]])
    sides = []
    for name, samples in zip(splits, zip(*pairs[:COPIES], strict=True), strict=False):
        shown = [[Mistake(i, labels[name][i], labels[name][i], 1.0) for i in samples]]
        sides += _shown(shown, seen.names[name], classes, folder)
    return [*zip(*sides, strict=True)]


def _splits(splits: Mapping[str, np.ndarray], classes: Sequence[str]) -> list[str]:
    lines = []
    for name, labels in splits.items():
        counts = np.bincount(labels, minlength=len(classes))
        few, many = (f"{counts[i]:,} of {classes[i]}" for i in counts.argsort()[[0, -1]].tolist())
        lines.append(f"{len(labels):,} {SPLITS[name]} samples, from {few} to {many}")
    return lines


def data_address(picture: np.ndarray) -> str:
    """A data: address of the picture, (height, width, channels) uint8, as JPEG, or as PNG if it is
    small."""
    from PIL import Image

    image = Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture)
    image.thumbnail((SIDE, SIDE))
    kind = "png" if max(picture.shape[:2]) <= 40 else "jpeg"
    content = io.BytesIO()
    image.save(content, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"


# ---- classes ------------------------------------------------------------------------------------


def _matrix(matrix: np.ndarray | None, classes: Sequence[str]) -> list[dict] | None:
    """The rows of the confusion matrix; None: there are too many classes."""
    if matrix is None or len(classes) > CLASSES_WITH_NUMBERS:
        return None
    rows = []
    for name, row in zip(classes, matrix.tolist(), strict=True):
        total = sum(row) or 1
        cells = [{"count": count, "part": round(0.62 * count / total, 3)} for count in row]
        rows.append({"name": name, "cells": cells})
    return rows


def _classes(matrix: np.ndarray | None, classes: Sequence[str]) -> list[list]:
    """The head of the table of classes, and its rows, the worst F1 first."""
    head, *rows = [[]] if matrix is None else class_rows(matrix, classes)
    return [head, *sorted(rows, key=lambda row: row[head.index("f1")] or "none")[:LISTED]]


# ---- plots --------------------------------------------------------------------------------------


def _curves(run: RecordedRun) -> list[tuple[str, list[tuple[str, str]], str]]:
    """(title, [(name, colour) of each line], <svg>) of loss, accuracy and learning rate."""
    of_training = [r for r in run.records if r.get("split") == "train"]
    train = [r for r in of_training if r.get("average_over") == "epoch"]
    mixed = any("accuracy_weighted" in r for r in train)
    evaluated = run.evaluations
    split = evaluated[0]["split"] if evaluated else "test"
    plots = []
    for key, title in (("loss", "loss"), ("accuracy", "accuracy, %")):
        weighted = mixed and key == "accuracy"
        name = "training (weighted by lambda)" if weighted else "training"
        lines = [
            (name, 0, train, "accuracy_weighted" if weighted else key),
            (SPLITS[split], 1, evaluated, key),
        ]
        plots.append((title, *_lines(lines, title)))
    steps = [r for r in of_training if r.get("average_over") == "steps"] or train
    plots.append(("learning rate", *_lines([("learning rate", 4, steps, "lr")], "learning rate")))
    return [one for one in plots if one[1]]


def _lines(
    lines: Sequence[tuple[str, int, list[dict], str]], title: str
) -> tuple[list[tuple[str, str]], str]:
    drawn = []
    for name, number, records, key in lines:
        known = [r for r in records if r.get(key) is not None]
        if known:
            drawn.append((name, number, [r["epoch"] for r in known], [r[key] for r in known]))
    legend = [(f"{name} {y[-1]:.4g}", COLOURS[number]) for name, number, _, y in drawn]
    if not drawn:
        return [], ""
    return legend, plot([one[1:] for one in drawn], "epoch", title)


def _calibration(bins: np.ndarray) -> dict:
    """How often predictions of each confidence are right."""
    samples, correct, confidence = bins
    there = samples > 0
    error = 100 * float(np.abs(correct - confidence).sum() / max(1, samples.sum()))
    x, y = 100 * confidence[there] / samples[there], 100 * correct[there] / samples[there]
    lines = [(7, [0.0, 100.0], [0.0, 100.0]), (0, x.tolist(), y.tolist())]
    sure = 100 * float(confidence.sum() / max(1, samples.sum()))
    right = 100 * float(correct.sum() / max(1, samples.sum()))
    svg = plot(lines, "probability of the predicted class, %", "calibration")
    return {"svg": svg, "error": f"{error:.1f}", "sure": f"{sure:.1f}", "right": f"{right:.1f}"}


# ---- where the time went, what was said ---------------------------------------------------------


def _phases(run: RecordedRun) -> list[tuple[str, str, float]]:
    """(name, per cent in words, per cent) of the phases of the time, of all epochs."""
    having, shares, before = [r for r in run.records if r.get("time_share")], [], 0.0
    for record in having:  # a part of an epoch counts as that
        shares.append((record["epoch"] - before, record["time_share"]))
        before = record["epoch"]
    if not (total := sum(weight for weight, _ in shares)):
        return []
    means = {p: 100 * sum(w * (s.get(p) or 0) for w, s in shares) / total for p in PHASES}
    return [(PHASES[p], f"{value:.1f} %", round(value, 1)) for p, value in means.items()]


def _notes(log: Path) -> list[str]:
    """Lines of the log that ask for attention, without their times."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    told = [line.split(" ", 2)[-1] for line in lines]
    asks = [line for line in told if line.startswith("note: ") or "% of the time: " in line]
    return list(dict.fromkeys(line.removeprefix("note: ") for line in asks))
