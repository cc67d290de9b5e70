"""Two pictures of a study: accuracy over epochs, and over learning rates."""

import os
from pathlib import Path


def draw_accuracy(summary: dict, path: Path) -> None:
    """Mean test accuracy of each length of training, from the lowest to the highest seed."""
    figure, panels = _panels(summary)
    for axis, batch in zip(panels, summary["batches"], strict=True):
        for colour, (label, figures) in enumerate(batch["optimizers"].items()):
            known = [length for length in figures["lengths"] if length["mean"] is not None]
            if not known:
                axis.plot([], [], color=f"C{colour}", label=f"{label}: diverged")
                continue
            x = [length["epochs"] for length in known]
            low, high = ([length[key] for length in known] for key in ("min", "max"))
            mean = [length["mean"] for length in known]
            axis.fill_between(x, low, high, color=f"C{colour}", alpha=0.15, lw=0)
            axis.plot(
                x, mean, color=f"C{colour}", marker="o", ms=4, lw=1.5,
                label=f"{label} {mean[-1]:.2f} %",
            )  # fmt: skip
        if batch["target_accuracy"] is not None:
            axis.axhline(
                batch["target_accuracy"], color="black", ls=":", lw=1, label="target", zorder=1
            )
        axis.set_xticks([length["epochs"] for length in figures["lengths"]])
        axis.set_xlabel("epochs of a whole training, its schedule fitted to them")
        axis.legend(frameon=True, framealpha=0.7, edgecolor="none", fontsize=8)
    _finish(figure, panels, summary, "test accuracy (%)", path)


def draw_learning_rates(summary: dict, path: Path) -> None:
    """Validation accuracy of the tuning runs over their learning rates."""
    figure, panels = _panels(summary)
    for axis, batch in zip(panels, summary["batches"], strict=True):
        for colour, (label, figures) in enumerate(batch["optimizers"].items()):
            trials = figures["lr_trials"]
            known = [trial for trial in trials if trial["val_accuracy"] is not None]
            x = [trial["lr"] for trial in known]
            y = [trial["val_accuracy"] for trial in known]
            axis.plot(x, y, color=f"C{colour}", marker="o", ms=4, lw=1.5, label=label)
            lost = [trial["lr"] for trial in trials if trial["val_accuracy"] is None]
            axis.plot(  # at the foot of the panel, each optimizer on a line of its own
                lost, [0.02 + 0.03 * colour] * len(lost), "x", color=f"C{colour}", ms=6, mew=1.5,
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
            decays = [t for t in figures["weight_decay_trials"] if t["val_accuracy"] is not None]
            axis.plot(
                [trial["lr"] for trial in decays],
                [trial["val_accuracy"] for trial in decays],
                "o", color=f"C{colour}", ms=4, mfc="none",
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("highest learning rate")
    panels[-1].plot([], [], "o", color="gray", ms=4, mfc="none", label="other weight decays")
    panels[-1].plot([], [], "x", color="gray", ms=6, mew=1.5, label="diverged")
    # Beside the panels: curves may lie anywhere in them.
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    _finish(figure, panels, summary, "validation accuracy (%)", path)


def _panels(summary: dict):
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    count = len(summary["batches"])
    figure = Figure(figsize=(max(7.0, 4.8 * count), 4.2), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    return figure, panels


def _finish(figure, panels, summary: dict, quantity: str, path: Path) -> None:
    for axis, batch in zip(panels, summary["batches"], strict=True):
        axis.set_title(f"batch {batch['batch']}", fontsize=10)
        axis.grid(alpha=0.3)
    panels[0].set_ylabel(quantity)
    figure.suptitle(summary["title"], fontsize=10, parse_math=False)
    figure.savefig(path, dpi=110)
