"""Divisions: exact, stratified, repeatable."""

import numpy as np
import pytest

from utils.data.splits import stratified_order, stratified_split, stratified_subset
from utils.errors import UserError


def unbalanced(sizes=(70, 20, 9, 2), seed=0):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).permutation(labels)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_split_is_a_stratified_partition(fraction):
    labels = unbalanced()
    kept, held_out = stratified_split(labels, fraction, seed=1)
    assert kept.dtype == held_out.dtype == np.int64
    assert sorted([*kept, *held_out]) == list(range(len(labels)))
    assert (np.diff(kept) > 0).all() and (np.diff(held_out) > 0).all()
    assert len(held_out) == np.clip(int(fraction * 101 + 0.5), 4, 97)
    for label in range(4):
        wanted = fraction * (labels == label).sum()
        got = (labels[held_out] == label).sum()
        assert 1 <= got <= (labels == label).sum() - 1
        # Off by rounding, and by what the guarantee for the smallest classes takes.
        assert abs(got - wanted) <= 2.5


def test_split_of_balanced_classes_is_balanced_and_depends_on_the_seed():
    labels = np.tile(np.arange(10), 500)
    _, held_out = stratified_split(labels, 0.1, seed=0)
    assert np.bincount(labels[held_out]).tolist() == [50] * 10
    assert np.array_equal(held_out, stratified_split(labels, 0.1, seed=0)[1])
    assert not np.array_equal(held_out, stratified_split(labels, 0.1, seed=1)[1])


def test_split_needs_two_of_each_class():
    with pytest.raises(UserError, match="class 'owl' has only one sample"):
        stratified_split(np.array([0, 0, 1]), 0.5, seed=0, classes=["cat", "owl"])
    with pytest.raises(UserError, match="class 1 has only one sample"):
        stratified_split(np.array([0, 0, 1]), 0.5, seed=0)
    for fraction in (0, 1, -0.5, 1.5):
        with pytest.raises(UserError, match="between 0 and 1"):
            stratified_split(unbalanced(), fraction, seed=0)


def test_subsets_are_exact_stratified_and_nested():
    labels = unbalanced()
    previous: set[int] = set()
    for amount in [4, 5, 0.06, 0.1, 20, 0.33, 50, 0.9, 100, 1.0]:
        indices = stratified_subset(labels, amount, seed=3)
        total = amount if amount > 1 else round(amount * len(labels))
        assert len(indices) == len(set(indices.tolist())) == total
        assert indices.dtype == np.int64 and (np.diff(indices) > 0).all()
        assert set(labels[indices]) == {0, 1, 2, 3}
        assert previous <= set(indices.tolist())
        previous = set(indices.tolist())
        for label in range(4):
            share = (labels == label).mean() * total
            assert abs((labels[indices] == label).sum() - share) <= 2.5
    assert not np.array_equal(stratified_subset(labels, 20, 3), stratified_subset(labels, 20, 4))
    balanced = np.tile(np.arange(10), 50)
    assert np.bincount(balanced[stratified_subset(balanced, 0.1, 0)]).tolist() == [5] * 10


@pytest.mark.parametrize("seed", [0, 1])
def test_every_part_of_the_order_is_websters_apportionment(seed):
    """Between the first sample of each class and the last: the next sample is of the class with the
    largest n / (2 s + 1), where s of its n are there already. In these sizes there are no ties."""
    sizes = np.array([40, 12, 6, 2])
    labels = unbalanced(sizes, seed)
    found = labels[stratified_order(labels, seed)]
    counts = np.ones(4, np.int64)
    for samples in range(4, len(labels) - 3):
        assert np.bincount(found[:samples], minlength=4).tolist() == counts.tolist()
        quotients = np.where(counts < sizes - 1, sizes / (2 * counts + 1), 0)
        counts[quotients.argmax()] += 1


@pytest.mark.parametrize(
    ("amount", "message"),
    [(3, "fewer than the 4 classes"), (0.01, "fewer than"), (102, "more than"), (2.5, "whole")],
)
def test_impossible_subsets_are_refused(amount, message):
    with pytest.raises(UserError, match=message):
        stratified_subset(unbalanced(), amount, seed=0)
