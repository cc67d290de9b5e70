"""Values of measures, and 95 % intervals for them, from counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .table import OF_SKLEARN, Measure

if TYPE_CHECKING:
    from .tally import Counts  # which imports PyTorch

Z = 1.959964  # 97.5 % of a normal distribution lie below
RESAMPLES = 1000
# Student's t for a two-sided interval of 95 %, by degrees of freedom; for other numbers of these
# that of the next lower one.
T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 14: 2.145, 16: 2.120, 19: 2.093, 24: 2.064, 29: 2.045, 59: 2.001,
}  # fmt: skip
# Measures of scores are slow: samples times classes and classes up to which they get an interval,
# and from how many resamples.
MOST_SCORES, MOST_CLASSES, RESAMPLES_OF_SCORES = 20_000, 20, 100

Interval = tuple[float, float]


def wilson_interval(successes: float, samples: int) -> Interval:
    """95 % interval, in per cent, for a share of independent samples: Wilson, "Probable inference,
    the law of succession, and statistical inference" (1927). From 0 to 100; never empty, and
    sensible for few samples and for shares near 0 and 100 %."""
    if not samples:
        return 0.0, 100.0
    share, z2 = successes / samples, Z * Z / samples
    middle = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / samples + z2 / samples / 4)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def paired(one: Sequence[float], other: Sequence[float]) -> dict:
    """Mean of the differences seed by seed, of two seeds or more, and half the width of its 95 %
    interval (Student): what other seeds would change."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    n = len(differences)
    t = T95[max(freedom for freedom in T95 if freedom <= n - 1)]
    half = t * statistics.stdev(differences) / math.sqrt(n)
    return {"mean": statistics.mean(differences), "half": half, "seeds": n}


@np.errstate(invalid="ignore", divide="ignore")
def value_of(measure: Measure, counts: Counts) -> float | None:
    """Its value, in per cent if it is told so; None where it is undefined, as the AUROC of one
    class alone."""
    counted = counts[measure.of]
    if measure.of == "hits":
        value = 100 * counted[: measure.k].sum() / counted.sum()
    elif measure.of == "confusions":
        value = _of_confusions(measure.name, margins(counted))
    elif measure.of == "calibration":
        value = _calibration_error(counted)
    else:
        value = _of_scores(measure, counted)
    return float(value) if math.isfinite(value) else None


@np.errstate(invalid="ignore", divide="ignore")
def interval_of(measure: Measure, counts: Counts) -> Interval | None:
    """The 95 % interval of `value_of`: what other samples would change, not another training.
    Wilson's for shares of samples, else the percentile bootstrap (Efron, "Bootstrap methods"
    (1979)). None: there is none, as of calibration errors, which few samples make larger."""
    counted = counts[measure.of]
    if measure.of == "hits":
        return wilson_interval(counted[: measure.k].sum(), counted.sum())
    if measure.of == "confusions" and counted.any():
        values = _of_confusions(measure.name, _resampled_margins(counted))
    elif measure.name in OF_SKLEARN:
        samples, classes = len(counted), counted.shape[1] - 1
        if samples * classes > MOST_SCORES or classes > MOST_CLASSES:
            return None
        drawn = np.random.default_rng(0).integers(0, samples, (RESAMPLES_OF_SCORES, samples))
        values = np.array([_of_scores(measure, counted[rows]) for rows in drawn])
    else:
        return None
    values = values[np.isfinite(values)]
    return tuple(np.quantile(values, (0.025, 0.975)).tolist()) if len(values) else None


# ---- of the confusion matrix --------------------------------------------------------------------


def margins(matrix: np.ndarray) -> np.ndarray:
    """(3, classes) float64: correct, true and predicted samples of each class."""
    return np.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)]).astype(float)


def _resampled_margins(matrix: np.ndarray) -> np.ndarray:
    """`margins` of RESAMPLES splits of the same size: (3, RESAMPLES, classes)."""
    rows, columns = np.nonzero(matrix)
    cells, classes, hits = matrix[rows, columns], len(matrix), rows == columns
    generator = np.random.default_rng(0)
    found = np.zeros((3, RESAMPLES, classes))
    for index in range(RESAMPLES):
        drawn = generator.multinomial(cells.sum(), cells / cells.sum())
        found[0, index] = np.bincount(rows[hits], drawn[hits], classes)
        found[1, index] = np.bincount(rows, drawn, classes)
        found[2, index] = np.bincount(columns, drawn, classes)
    return found


@np.errstate(invalid="ignore", divide="ignore")
def class_scores(margins: np.ndarray) -> dict[str, np.ndarray]:
    """Recall (the class's accuracy), precision and F1 of each class, 0 to 1, from its `margins`.

    NaN where there is nothing to measure: recall without samples, precision without predictions, F1
    without both. F1 is 2 true positives / (samples + predictions).
    """
    hits, true, predicted = margins
    f1 = 2 * hits / (true + predicted)
    return {"recall": hits / true, "precision": hits / predicted, "f1": f1}


def _of_confusions(name: str, margins: np.ndarray):
    """scikit-learn's measure of that name, along the last axis. Classes count that have a sample or
    a prediction; a precision without predictions and a recall without samples are 0, but the
    balanced accuracy leaves out classes without samples."""
    hits, true, predicted = margins
    total, scores = true.sum(-1), class_scores(margins)
    if name == "cohen_kappa":
        chance = (true * predicted).sum(-1) / total**2
        return (hits.sum(-1) / total - chance) / (1 - chance)
    if name == "balanced_accuracy":
        return 100 * np.nansum(scores["recall"], -1) / (true > 0).sum(-1)
    of_classes = np.nan_to_num(scores[name.partition("_")[0]])
    if name.endswith("_weighted"):
        return (of_classes * true).sum(-1) / total
    return of_classes.sum(-1) / (true + predicted > 0).sum(-1)


# ---- of probabilities ---------------------------------------------------------------------------


def _calibration_error(bins: np.ndarray) -> float:
    """How far the probability of the likeliest class is from the share of correct ones, in the mean
    over all samples, in bins of equal width: Guo et al., "On calibration of modern neural networks"
    (2017), equation 3."""
    samples, correct, confidence = bins
    return np.abs(correct - confidence).sum() / samples.sum()


def _of_scores(measure: Measure, rows: np.ndarray) -> float:
    """Of the user's function; else the mean over the classes that have samples, each against the
    rest. nan where it is undefined."""
    targets, scores = rows[:, 0].astype(np.int64), rows[:, 1:]
    if measure.compute is not None:
        return measure.compute(targets, scores)
    from sklearn.metrics import average_precision_score, roc_auc_score

    of_class = roc_auc_score if measure.name == "roc_auc_ovr" else average_precision_score
    present = np.unique(targets)
    if len(present) < 2 or not np.isfinite(scores).all():
        return math.nan
    return float(np.mean([of_class(targets == label, scores[:, label]) for label in present]))
