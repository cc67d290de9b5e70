"""What stands out among the answers to a split: how often, how surely, and which are wrong."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .outcomes import MOST_CLASSES, Outcomes
from .tally import BINS

MOST_VALUES = 5_000_000  # probabilities, of which cleanlab makes a few copies
MOST_IN_MATRIX = 2000  # classes; a matrix of more would take more than 32 MB


@dataclass(frozen=True, eq=False)
class Mistake:
    """A sample that was classified wrongly.

    Attributes:
        sample: its index in the split.
        true, predicted: classes.
        probability: of the predicted class.
    """

    sample: int
    true: int
    predicted: int
    probability: float


@dataclass(frozen=True, eq=False)
class Doubt(Mistake):
    """A sample whose label is doubtful; `quality` is the label's probability."""

    quality: float


@dataclass(frozen=True, eq=False)
class Findings:
    """
    Attributes:
        matrix: (classes, classes) int64, a row for each true class and a column for each predicted
            one; None for more than MOST_IN_MATRIX.
        bins: (3, BINS) by the probability of the predicted class: samples, correct ones, and the
            sum of these probabilities.
        mistakes: the surest ones, by the probability of the predicted class, the surest first.
    """

    matrix: np.ndarray | None
    bins: np.ndarray
    mistakes: list[Mistake]


def find(outcomes: Outcomes, most: int) -> Findings:
    """Reads the answers once. `most`: mistakes that are kept. Raises OSError."""
    classes = outcomes.classes
    cells = np.zeros(classes**2, np.int64) if classes <= MOST_IN_MATRIX else None
    bins, mistakes, start = np.zeros((3, BINS)), list[Mistake](), 0
    for targets, _, order, p in outcomes.chunks():
        likeliest = p.argmax(1)[:, None]
        predicted = np.take_along_axis(order, likeliest, 1)[:, 0]
        sure = np.take_along_axis(p, likeliest, 1)[:, 0].astype(float)
        right = predicted == targets
        if cells is not None:
            cells += np.bincount(targets * classes + predicted, minlength=len(cells))
        place = np.nan_to_num(sure * BINS).astype(int).clip(0, BINS - 1)
        for row, weights in zip(bins, (None, right, sure), strict=True):
            row += np.bincount(place, weights, BINS)
        wrong, sure = np.flatnonzero(~right), np.nan_to_num(sure, nan=1.0)
        for row in wrong[np.argsort(-sure[wrong], kind="stable")[:most]].tolist():
            found = int(targets[row]), int(predicted[row]), float(sure[row])
            mistakes.append(Mistake(start + row, *found))
        mistakes = sorted(mistakes, key=lambda one: -one.probability)[:most]
        start += len(targets)
    matrix = None if cells is None else cells.reshape(classes, classes)
    return Findings(matrix, bins, mistakes)


def doubtful(outcomes: Outcomes) -> list[Doubt]:
    """The most doubtful first, by confident learning (Northcutt, Jiang and Chuang, 2021); the model
    must not have been trained on these samples. Raises OSError; UserError: there are too many."""
    if not outcomes.keeps_all or outcomes.samples * outcomes.classes > MOST_VALUES:
        raise UserError(f"more than {MOST_CLASSES} classes or {MOST_VALUES:,} probabilities")
    from cleanlab.filter import find_label_issues

    chunks = [(targets, p) for targets, _, _, p in outcomes.chunks()]
    labels, p = map(np.concatenate, zip(*chunks, strict=True))
    with warnings.catch_warnings(action="ignore"):  # of classes with few samples
        found = find_label_issues(labels, p, return_indices_ranked_by="self_confidence", n_jobs=1)
    labels, p = labels[found], p[found]
    columns = found, labels, p.argmax(1), p.max(1), p[range(len(found)), labels]
    return [Doubt(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
