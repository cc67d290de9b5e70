"""Draws the samples of an epoch so that all classes are equally likely."""

from __future__ import annotations

import numpy as np


class ClassSampler:
    """Draws with replacement: first a class, each with the same probability, then one of its
    samples. `labels`: (samples,) int64, of the training split."""

    def __init__(self, labels: np.ndarray):
        self.labels = np.array(labels, dtype=np.int64)

    def draw(self, generator: np.random.Generator, among: np.ndarray | None = None) -> np.ndarray:
        """(samples,) int64: indices of as many samples as there are; only of those in `among`, (m,)
        int64, and of their classes, unless it is None."""
        among = np.arange(len(self.labels)) if among is None else among
        by_class = among[np.argsort(self.labels[among], kind="stable")]
        _, firsts, counts = np.unique(self.labels[by_class], return_index=True, return_counts=True)
        chosen = generator.integers(len(counts), size=len(self.labels))
        return by_class[firsts[chosen] + generator.integers(counts[chosen])]

    def mean(self, values: np.ndarray) -> float:
        """The expected one of `values`, (samples,), for a sample that is drawn."""
        counts, sums = np.bincount(self.labels), np.bincount(self.labels, weights=values)
        return float((sums[counts > 0] / counts[counts > 0]).mean())
