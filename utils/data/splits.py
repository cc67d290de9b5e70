"""Stratified splits and subsets of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UserError

# For --test_fraction: the same samples are held out whatever --seed is, so that runs with other
# seeds, or with the weights of another run, are measured on samples that none of them has seen.
TEST_SEED = 0


def divide(data: Any, val_fraction: float, subset: float | None, seed: int) -> tuple[Any, Any]:
    """(training split, validation split) of an ImageData or TextData: with `val_fraction`, training
    samples are held out for validation; `subset`, if it is not None, is taken of the others."""
    train, val = data.train, data.val
    if val_fraction:
        train, val = split_off(train, val_fraction, seed, data.classes)
    if subset is not None:
        train = train.part(stratified_subset(train.labels, subset, seed))
    return train, val


def split_off(samples: Any, fraction: float, seed: int, classes: Sequence[str]) -> tuple[Any, Any]:
    """A split in two, (kept, held out), as `stratified_split` does, or of whole groups if it has
    some: see `Groups.hold_out`."""
    groups = getattr(samples, "groups", None)  # published pictures have none
    divide_labels = groups.hold_out if groups else stratified_split
    kept, held_out = divide_labels(samples.labels, fraction, seed, classes)
    return samples.part(kept), samples.part(held_out)


def stratified_split(
    labels: np.ndarray, fraction: float, seed: int, classes: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out `fraction` (between 0 and 1) of the samples of every class.

    Returns `(kept, held_out)`, sorted int64 indices into `labels` (samples,). The number held out
    is `fraction * samples`, rounded, and adjusted only if a class would have no sample on one side.
    `classes` has the names of the labels, for messages.

    Raises:
        UserError: a class has a single sample, or the fraction is out of range.
    """
    labels = np.asarray(labels)
    if not 0 < fraction < 1:
        raise UserError(f"a fraction to hold out must lie between 0 and 1, not {fraction}")
    values, counts = np.unique(labels, return_counts=True)
    if not len(values):
        raise UserError("there are no samples to hold a fraction out of")
    if counts.min() < 2:
        label = int(values[counts.argmin()])
        name = repr(classes[label]) if classes is not None else str(label)
        raise UserError(
            f"class {name} has only one sample, and a split needs one for each part: add samples "
            "of this class, or remove it"
        )
    total = int(np.clip(_round(fraction * len(labels)), len(values), len(labels) - len(values)))
    order = stratified_order(labels, seed)
    return np.sort(order[total:]), np.sort(order[:total])


def stratified_subset(labels: np.ndarray, amount: float | int, seed: int) -> np.ndarray:
    """Sorted int64 indices of a subset with the same fraction of every class.

    `amount` is a fraction up to 1 (1: everything) or, above 1, a whole number of samples; the
    total is exact. With the same seed a larger subset contains every smaller one.

    Raises:
        UserError: fewer samples than classes, more than there are, or not a whole number.
    """
    labels = np.asarray(labels)
    if not amount > 0 or (amount > 1 and amount != int(amount)):
        raise UserError(
            f"--subset takes a fraction up to 1 or a whole number of samples, not {amount}"
        )
    amount = int(amount) if amount > 1 else amount
    total = int(amount) if amount > 1 else _round(amount * len(labels))
    n_classes = len(np.unique(labels))
    if total > len(labels):
        raise UserError(f"--subset {amount} asks for more than the {len(labels)} samples there are")
    if total < n_classes:
        raise UserError(
            f"--subset {amount} is {total} of {len(labels)} samples, fewer than the {n_classes} "
            f"classes: take at least {n_classes}"
        )
    return np.sort(stratified_order(labels, seed)[:total])


def stratified_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """A random order of the samples in which every prefix holds the classes in proportion.

    The r-th of the n samples of a class (in random order) stands at (r + 1/2) / n, so that the
    prefix up to t holds round(t * n) of them (Webster's apportionment), ties broken at random.
    The first sample of every class comes before all others and the last (of two or more) after
    all others, so that both sides of a cut have each class as long as it has room for them.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    _, inverse, counts = np.unique(labels[shuffled], return_inverse=True, return_counts=True)
    by_class = np.argsort(inverse, kind="stable")
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    n = counts[inverse]
    position = (rank + 0.5) / n
    position[rank == n - 1] = 1.0
    position[rank == 0] = 0.0
    return shuffled[np.argsort(position, kind="stable")].astype(np.int64)


def _round(value: float) -> int:
    """Half away from zero, where Python rounds half to even."""
    return int(value + 0.5)
