"""curves.png: loss, accuracy and learning rate over the epochs of a run."""

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..files import replace_file
from ..machine.packages import is_installed
from ..measures.table import Measure
from ..plural import counted
from .console import epoch_text

COLOURS = {"train": "tab:blue", "val": "tab:orange", "test": "tab:green"}
LEGEND = {"frameon": True, "framealpha": 0.7, "edgecolor": "none", "fontsize": 8}
# Curves with more points than this have no markers.
MARKED_POINTS = 60


def draw_curves(
    records: list[dict],
    path: Path,
    title: str,
    measures: Sequence[Measure] = (),
    best: float | None = None,
) -> None:
    """Draws the records of metrics.jsonl; replaces `path` atomically. Without matplotlib
    nothing is drawn.

    Args:
        measures: those that have a panel of their own, in addition to loss and accuracy.
        best: the epoch of the best weights; None: it is not known.

    Faint lines are training figures of each log line, strong ones those of whole epochs. A star
    marks the best epoch, a dotted line each record with an "event".
    There is one more panel if records have "lambda", one if they have "strength", and one if they
    have "round_steps".

    Raises:
        OSError: the file cannot be written.
    """
    if not is_installed("matplotlib"):
        return
    from matplotlib.figure import Figure

    further: list[tuple[Callable, list[dict]]] = [
        (draw, having)
        for draw, key in (
            (_draw_lambda, "lambda"),
            (_draw_strength, "strength"),
            (_draw_rounds, "round_steps"),
        )
        if (having := [r for r in records if r.get(key) is not None])
    ]
    if having := [r for r in records if any(measure.name in r for measure in measures)]:
        further.insert(0, (partial(_draw_measures, measures=measures), having))
    figure = Figure(figsize=(4.2 * (3 + len(further)), 3.8), layout="constrained")
    axes = figure.subplots(1, 3 + len(further))
    _draw_figure(axes[0], records, "loss", best)
    _draw_figure(axes[1], records, "accuracy", best)
    _draw_learning_rate(axes[2], records)
    for axis, (draw, having) in zip(axes[3:], further, strict=True):
        draw(axis, having)
    last = max((r["epoch"] for r in records), default=0.0)
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
        axis.set_xlim(0, max(last * 1.02, 1e-9) if last else 1)
        _mark_events(axis, records)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[0]:
            axis.legend(**LEGEND)
    figure.suptitle(title, fontsize=10, parse_math=False)
    save_figure(figure, path)


def save_figure(figure, path: Path) -> None:
    """Writes a PNG atomically. Raises OSError."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    replace_file(path, content.getvalue())


# ---- the panels -------------------------------------------------------------------------------


def _plot(axis, curve: tuple[list, list], **style) -> None:
    """A line, with markers where there are few points; nothing if there are none."""
    x, y = curve
    if y:
        marker = {"marker": "o" if len(y) <= MARKED_POINTS else None, "ms": 3 if len(y) > 1 else 6}
        axis.plot(x, y, **({"lw": 1.5} | marker | style))


def _draw_figure(axis, records: list[dict], key: str, best: float | None) -> None:
    """Loss or accuracy of every split."""
    unit, digits, better = ("", 3, min) if key == "loss" else (" %", 2, max)
    weighted = f"{key}_weighted"  # by lambda, on mixed training samples
    mixed = any(weighted in r for r in records)
    windows = _curve(_of(records, "train", steps=True), weighted if mixed else key)
    _plot(axis, windows, color=COLOURS["train"], alpha=0.25, lw=1)
    ends = {split: _curve(_of(records, split, steps=False), key) for split in COLOURS}
    name = {"train": "train (weighted by lambda)"} if mixed else {}
    if mixed:
        ends["train"] = _curve(_of(records, "train", steps=False), weighted)
    for split, (x, y) in ends.items():
        if not y:  # the run diverged, or has no such split
            continue
        label = f"{name.get(split, split)} {y[-1]:.{digits}f}{unit}"
        if _of(records, split, steps=False)[-1].get(key, 0) is None:
            label = f"{split} not finite after epoch {epoch_text(x[-1])}"
        if len(y) > 1 and split == "val":  # nothing is chosen by the test set
            label += f", best {better(y):.{digits}f}"
        _plot(axis, (x, y), color=COLOURS[split], label=label)
        if split == "val" and best is not None and best in x:
            axis.plot(
                best, y[x.index(best)], "*", color=COLOURS[split], mec="black", mew=0.6, ms=11,
                ls="none", label=f"best epoch {epoch_text(best)}", zorder=3,
            )  # fmt: skip
    clean = _curve(_of(records, "train", steps=False), f"{key}_clean")
    if clean[1]:
        label = f"train, unmixed {clean[1][-1]:.{digits}f}{unit}"
        _plot(axis, clean, color=COLOURS["train"], ls="--", lw=1, label=label)
    axis.set_title("loss" if key == "loss" else "accuracy (%)")
    if key == "loss":
        limit_loss(axis, windows, ends)


def limit_loss(axis, windows, ends) -> None:
    """Cuts off high values that would flatten the rest of the curves, and notes how many.

    The limit is three times the 75th percentile of the epochs' values (with fewer than four of
    them, of the log lines' values too). Nothing is cut unless the highest value is at least twice
    the limit, so that more than half of the panel would be wasted.
    """
    means = [value for _, y in ends.values() for value in y]
    everything = means + windows[1]
    values = sorted(means if len(means) >= 4 else everything)
    if len(values) < 4:
        return
    limit = 3 * values[(3 * len(values)) // 4]
    if limit <= 0 or max(everything) < 2 * limit:
        return
    axis.set_ylim(top=limit)
    lowest = min(everything)
    axis.set_ylim(bottom=lowest - 0.05 * (limit - lowest))
    over = sum(value > limit for value in everything)
    _say(axis, f"{counted(over, 'higher value')}, up to {max(everything):.3g}", y=0.97, size=7)


def _draw_measures(axis, records: list[dict], measures: Sequence[Measure]) -> None:
    """As fractions of 1; those of the validation split, or of the test set without one."""
    split = "val" if _of(records, "val", steps=False) else "test"
    for measure in measures:
        x, y = _curve(_of(records, split, steps=False), measure.name)
        if y:
            fractions = [value / (100 if measure.percent else 1) for value in y]
            _plot(axis, (x, fractions), label=measure.text(y[-1]))
    axis.set_title(f"{split}: further measures")


def _draw_learning_rate(axis, records: list[dict]) -> None:
    """On a logarithmic scale if the median is far below the highest rate."""
    x, y = _curve(_of(records, "train", steps=True), "lr")
    if len(y) < 2:
        x, y = _curve(sorted(records, key=lambda r: r["epoch"]), "lr")
    axis.set_title("learning rate")
    axis.plot(x, y, color="tab:gray", marker="o" if len(y) == 1 else None)
    if y and 0 < sorted(y)[len(y) // 2] < max(y) / 20:
        axis.set_yscale("log", nonpositive="mask")
    elif any(y):
        axis.set_ylim(0, 1.05 * max(y))


def _draw_lambda(axis, records: list[dict]) -> None:
    """How much was mixed: the mean of max(lambda, 1 - lambda)."""
    _plot(axis, _curve(_of(records, "train", steps=True), "lambda"), color="tab:purple", alpha=0.25)
    of_epochs = _curve(_of(records, "train", steps=False), "lambda")
    _plot(axis, of_epochs, color="tab:purple", label="".join(f"{y:.3f}" for y in of_epochs[1][-1:]))
    axis.set_ylim(0.48, 1.02)
    axis.set_title("mean of max(lambda, 1 - lambda)")


def _draw_strength(axis, records: list[dict]) -> None:
    """What --mixup auto has measured, and the strength of mixing that followed."""
    for key, label, colour in (
        ("strength", "strength of mixing", "tab:purple"),
        ("gap", "gap: 1 - trained / held-out loss", "tab:red"),
    ):
        style = {"drawstyle": "steps-post"} if key == "strength" else {}
        _plot(axis, _curve(records, key), color=colour, label=label, **style)
    axis.set_ylim(min([-0.05, *(r["gap"] for r in records if _is_finite(r["gap"]))]), 1.05)
    axis.set_title("--mixup auto")


def _draw_rounds(axis, records: list[dict]) -> None:
    """Of local steps: H, and on a second scale how far the workers are from their mean."""
    x, y = _curve(records, "round_steps")
    axis.plot(x, y, color="tab:brown", drawstyle="steps-post", lw=1.5)
    if max(y) > 20 * min(y):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.05 * max(y))
        axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(f"H, steps; now {y[-1]:,}", color="tab:brown")
    x, y = _curve(records, "worker_distance")
    if any(y):
        other = axis.twinx()
        other.plot(x, [100 * value for value in y], color="tab:cyan", lw=1)
        other.set_ylim(bottom=0)
        other.set_ylabel(f"workers from their mean, %; now {100 * y[-1]:.2g}", color="tab:cyan")
    axis.set_title("rounds of local steps")


def _mark_events(axis, records: list[dict]) -> None:
    for record in records:
        if record.get("event"):
            axis.axvline(record["epoch"], color="black", ls=":", lw=1)
            axis.text(record["epoch"], 0.02, f" {record['event']}", rotation=90, fontsize=7,
                      va="bottom", ha="right", transform=axis.get_xaxis_transform(),
                      parse_math=False)  # fmt: skip


def _say(axis, text: str, y: float = 0.5, size: int = 9) -> None:
    axis.text(0.5, y, text, transform=axis.transAxes, ha="center", va="top", fontsize=size,
              color="gray")  # fmt: skip


# ---- the records ------------------------------------------------------------------------------


def _of(records: list[dict], split: str, *, steps: bool) -> list[dict]:
    """The records of a split: of log lines, or of whole epochs and evaluations.

    Records with a "model", which are of other weights than the run's main ones, are for the
    trackers only.
    """
    return [
        r
        for r in records
        if r.get("split") == split
        and (r.get("average_over") == "steps") == steps
        and not r.get("model")
    ]


def _curve(records: list[dict], key: str) -> tuple[list, list]:
    points = [(r["epoch"], r[key]) for r in records if _is_finite(r.get(key))]
    return [x for x, _ in points], [y for _, y in points]


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
