"""Values of measures, and 95 % intervals for them, from counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .table import k_of, measure_of

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
    """95 % interval for a share of independent samples: Wilson, "Probable inference, the law of
    succession, and statistical inference" (1927). From 0 to 1; never empty, and sensible for few
    samples and for shares near 0 and 1."""
    if not samples:
        return 0.0, 1.0
    share, z2 = successes / samples, Z * Z / samples
    middle = (share + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(share * (1 - share) / samples + z2 / samples / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(one: Sequence[float], other: Sequence[float]) -> dict:
    """Mean of the differences seed by seed, of two seeds or more, and half the width of its 95 %
    interval (Student): what other seeds would change."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    n = len(differences)
    t = T95[max(freedom for freedom in T95 if freedom <= n - 1)]
    half = t * statistics.stdev(differences) / math.sqrt(n)
    return {"mean": statistics.mean(differences), "half": half, "seeds": n}


def value_of(name: str, counts: Counts) -> float | None:
    """A measure of the table, in per cent if it is told so; None where it is undefined, as the
    AUROC of one class alone."""
    source = measure_of(name).of
    if not counts.samples:
        return None
    if source == "hits":
        return 100 * counts.hits[k_of(name)] / counts.samples
    if source == "confusions":
        assert counts.confusions is not None
        value = float(_of_confusions(name, *_margins(counts.confusions)))
        return value if math.isfinite(value) else None
    if source == "calibration":
        assert counts.bins is not None
        return _calibration_error(counts.bins)
    assert counts.scores is not None
    return _of_scores(name, *counts.scores)


def interval_of(name: str, counts: Counts) -> Interval | None:
    """The 95 % interval of `value_of`: what other samples would change, not another training.
    Wilson's for shares of samples, else the percentile bootstrap (Efron, "Bootstrap methods"
    (1979)). None: there is none, as of calibration errors, which few samples make larger."""
    source = measure_of(name).of
    if not counts.samples:
        return None
    if source == "hits":
        low, high = wilson_interval(counts.hits[k_of(name)], counts.samples)
        return 100 * low, 100 * high
    if source == "confusions":
        assert counts.confusions is not None
        values = _of_confusions(name, *_resampled_margins(counts.confusions))
    elif source == "scores":
        assert counts.scores is not None
        targets, scores = counts.scores
        if scores.size > MOST_SCORES or scores.shape[1] > MOST_CLASSES:
            return None
        generator = np.random.default_rng(0)
        drawn = generator.integers(0, len(targets), (RESAMPLES_OF_SCORES, len(targets)))
        found = [_of_scores(name, targets[rows], scores[rows]) for rows in drawn]
        values = np.array([value for value in found if value is not None])
    else:
        return None
    values = values[np.isfinite(values)]
    return tuple(np.quantile(values, (0.025, 0.975)).tolist()) if len(values) else None


# ---- of the confusion matrix --------------------------------------------------------------------


def _margins(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(correct, true, predicted) samples of each class, (classes,) float64."""
    return matrix.diagonal().astype(float), matrix.sum(1).astype(float), matrix.sum(0).astype(float)


def _resampled_margins(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_margins` of RESAMPLES splits of the same size: (RESAMPLES, classes)."""
    rows, columns = np.nonzero(matrix)
    cells, classes = matrix[rows, columns], len(matrix)
    generator = np.random.default_rng(0)
    total = int(cells.sum())
    margins = np.zeros((3, RESAMPLES, classes))
    hits = rows == columns
    for index in range(RESAMPLES):
        drawn = generator.multinomial(total, cells / total)
        margins[0, index] = np.bincount(rows[hits], drawn[hits], classes)
        margins[1, index] = np.bincount(rows, drawn, classes)
        margins[2, index] = np.bincount(columns, drawn, classes)
    return margins[0], margins[1], margins[2]


def _of_confusions(name: str, hits: np.ndarray, true: np.ndarray, predicted: np.ndarray):
    """scikit-learn's measure of that name, along the last axis. Classes count that have a sample or
    a prediction; a precision without predictions and a recall without samples are 0, but the
    balanced accuracy leaves out classes without samples."""
    total = true.sum(-1)
    present = true + predicted > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        if name == "cohen_kappa":
            chance = (true * predicted).sum(-1) / total**2
            return (hits.sum(-1) / total - chance) / (1 - chance)
        if name == "matthews_corrcoef":
            spread = (total**2 - (true**2).sum(-1)) * (total**2 - (predicted**2).sum(-1))
            covariance = hits.sum(-1) * total - (true * predicted).sum(-1)
            return np.where(spread > 0, covariance / np.sqrt(spread), 0.0)
        recall, precision = hits / true, hits / predicted
        if name == "balanced_accuracy":
            return 100 * np.nansum(recall, -1) / (true > 0).sum(-1)
        scores = {
            "f1": 2 * hits / (true + predicted),
            "precision": np.where(predicted > 0, precision, 0.0),
            "recall": np.where(true > 0, recall, 0.0),
        }[name.partition("_")[0]]
        scores = np.where(present, scores, 0.0)
        if name.endswith("_weighted"):
            return (scores * true).sum(-1) / total
        return scores.sum(-1) / present.sum(-1)


# ---- of probabilities ---------------------------------------------------------------------------


def _calibration_error(bins: np.ndarray) -> float | None:
    """How far the probability of the likeliest class is from the share of correct ones, in the mean
    over all samples, in bins of equal width: Guo et al., "On calibration of modern neural networks"
    (2017), equation 3."""
    samples, correct, confidence = bins
    error = float(np.abs(correct - confidence).sum() / samples.sum())
    return error if math.isfinite(error) else None


def _of_scores(name: str, targets: np.ndarray, scores: np.ndarray) -> float | None:
    """The mean over the classes that have samples, each against the rest."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    compute = {"roc_auc_ovr": roc_auc_score, "average_precision": average_precision_score}[name]
    present = np.unique(targets)
    if len(present) < 2 or not np.isfinite(scores).all():
        return None
    return float(np.mean([compute(targets == label, scores[:, label]) for label in present]))
