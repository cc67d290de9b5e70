"""curves.png: loss, accuracy and learning rate over the run."""

import os
from pathlib import Path


def draw_curves(records: list[dict], path: Path, title: str) -> None:
    """Draws the records of metrics.jsonl; replaces `path` in one moment."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    colours = {"train": "tab:blue", "val": "tab:orange", "test": "tab:green"}
    steps = [r for r in records if r["split"] == "train" and r.get("average_over") == "steps"]
    for axis, key in ((loss, "loss"), (accuracy, "accuracy")):
        axis.plot(*_curve(steps, key), color=colours["train"], alpha=0.25, lw=1)
        for split, colour in colours.items():
            ends = [r for r in records if r["split"] == split and r.get("average_over") != "steps"]
            x, y = _curve(ends, key)
            if y:  # a run that diverged has none
                label = f"{split} {y[-1]:.3f}" if key == "loss" else f"{split} {y[-1]:.2f} %"
                axis.plot(x, y, color=colour, label=label, marker="o", ms=3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    loss.set_title("loss")
    accuracy.set_title("accuracy (%)")
    rate.plot(*_curve(steps, "lr"), color="tab:gray")
    rate.set_title("learning rate")
    for axis in (loss, accuracy, rate):
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    aside = path.with_name(f".{path.name}.tmp")
    figure.savefig(aside, format="png", dpi=110)
    os.replace(aside, path)


def _curve(records: list[dict], key: str) -> tuple[list, list]:
    points = [(r["epoch"], r[key]) for r in records if r.get(key) is not None]
    return [x for x, _ in points], [y for _, y in points]
