"""Doubtful labels: those that cleanlab finds, in the order of their quality."""

import numpy as np
import pytest
import torch

from utils.exchange import Exchange
from utils.measures.findings import doubtful
from utils.measures.outcomes import Outcomes

pytest.importorskip("cleanlab")
FLIPPED = {3: 1, 50: 2, 100: 0}  # sample -> the class that it is given


def recorded(classes: int = 3, flipped: dict[int, int] | None = None, given: int = 3) -> Outcomes:
    """Of 120 samples of `given` classes, which the model tells apart."""
    rng, truth = np.random.default_rng(0), np.arange(120) // (120 // given)
    logits = rng.normal(size=(120, classes)).astype(np.float32)
    logits[np.arange(120), truth] += 4
    labels = truth.copy()
    for sample, label in (flipped or {}).items():
        labels[sample] = label
    found = Outcomes(classes, [np.arange(120)], Exchange())
    found.add(torch.from_numpy(logits), torch.from_numpy(labels))
    found.finish()
    return found


def test_flipped_labels_are_found():
    from cleanlab.filter import find_label_issues

    outcomes = recorded(flipped=FLIPPED)
    ((labels, _, _, p),) = outcomes.chunks()
    doubts = doubtful(outcomes)
    assert {doubt.sample for doubt in doubts} == FLIPPED.keys()
    ranked = find_label_issues(labels, p, return_indices_ranked_by="self_confidence", n_jobs=1)
    assert [doubt.sample for doubt in doubts] == ranked.tolist()
    for doubt in doubts:
        assert (doubt.true, doubt.predicted) == (FLIPPED[doubt.sample], doubt.sample // 40)
        assert doubt.quality == p[doubt.sample, doubt.true] < 0.3 < doubt.probability
    assert sorted(qualities := [doubt.quality for doubt in doubts]) == qualities


@pytest.mark.filterwarnings("error::UserWarning")
def test_right_labels_raise_no_doubt():
    assert doubtful(recorded()) == []
    assert doubtful(recorded(classes=4)) == []  # of the fourth there are no samples
    assert doubtful(recorded(classes=2, given=1)) == []
