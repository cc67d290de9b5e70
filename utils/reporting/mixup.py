"""mixup_policy.png: how strongly meta-mixup mixes each pair of classes."""

import io
import os
from pathlib import Path

import numpy as np

from utils.files import replace_file
from utils.reporting.classes import CLASSES_WITH_NAMES, CLASSES_WITH_NUMBERS, plotted_names

TITLE = "what mixup has learned: 0.5 is half and half, 1 is not mixed"
WHAT = "mean of the larger of lambda and 1 - lambda"


def draw_mean_lambda(mean: np.ndarray, classes: list[str], path: Path) -> None:
    """Draws the mean of the larger of lambda and 1 - lambda for each pair of classes; writes the
    number if it is the same for all pairs.

    Args:
        mean: (classes, classes), 1/2 (half and half) to 1 (not mixed).
        classes: their names, of any characters and length.
        path: of the PNG, replaced atomically.

    Raises:
        OSError: the file cannot be written.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    if mean.max() - mean.min() < 1e-6:
        _save(_number(float(mean.mean())), path)
        return
    count = len(classes)
    with_numbers = count <= CLASSES_WITH_NUMBERS
    inches = min(max(4.5, 0.55 * count), 10.0)
    figure = Figure(figsize=(inches + 2, inches + 1), layout="compressed")
    axis = figure.subplots()
    low, high = float(mean.min()), float(mean.max())
    room = max(0.02, (high - low) / 20)  # so that nearly equal values have nearly equal colours
    image = axis.imshow(mean, vmin=low - room, vmax=high + room, cmap="viridis")
    bar = figure.colorbar(image, ax=axis, shrink=0.8, fraction=0.04)
    bar.set_label(WHAT)
    if count <= CLASSES_WITH_NAMES:
        names = plotted_names(classes)
        style = {"fontsize": 9 if with_numbers else 6, "parse_math": False}
        axis.set_xticks(range(count), names, rotation=90, **style)
        axis.set_yticks(range(count), names, **style)
    if with_numbers:
        for (i, j), value in np.ndenumerate(mean):
            colour = "white" if value < (low + high) / 2 else "black"
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_title(TITLE, fontsize=9)
    _save(figure, path)


def _number(value: float):
    """A figure with the number that all pairs of classes share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 2))
    figure.suptitle(TITLE, fontsize=9)
    figure.text(0.5, 0.45, f"{value:.3f}", ha="center", va="center", fontsize=24)
    figure.text(0.5, 0.15, f"{WHAT}, for all pairs of classes", ha="center", fontsize=9)
    return figure


def _save(figure, path: Path) -> None:
    """Writes a PNG atomically. Raises OSError."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    replace_file(path, content.getvalue())
