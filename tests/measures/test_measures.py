"""Measures against scikit-learn on the samples themselves, and their intervals."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from utils.errors import UserError
from utils.exchange import Exchange
from utils.measures.compute import interval_of, value_of, wilson_interval
from utils.measures.measures import Measures, usual_measures
from utils.measures.table import MEASURES, canonical_name, measure_of, names_in
from utils.measures.tally import Tally

SAMPLES = 300
# name -> (true, predicted, probabilities) -> value
REFERENCES = {
    "accuracy": lambda y, p, s: 100 * metrics.accuracy_score(y, p),
    "balanced_accuracy": lambda y, p, s: 100 * metrics.balanced_accuracy_score(y, p),
    "f1_macro": lambda y, p, s: metrics.f1_score(y, p, average="macro"),
    "f1_weighted": lambda y, p, s: metrics.f1_score(y, p, average="weighted"),
    "precision_macro": lambda y, p, s: metrics.precision_score(
        y, p, average="macro", zero_division=0
    ),
    "recall_macro": lambda y, p, s: metrics.recall_score(y, p, average="macro", zero_division=0),
    "cohen_kappa": lambda y, p, s: metrics.cohen_kappa_score(y, p),
    "roc_auc_ovr": lambda y, p, s: np.mean(
        [metrics.roc_auc_score(y == label, s[:, label]) for label in np.unique(y)]
    ),
    "average_precision": lambda y, p, s: np.mean(
        [metrics.average_precision_score(y == label, s[:, label]) for label in np.unique(y)]
    ),
    "top2_accuracy": lambda y, p, s: (
        100 * np.mean([label in np.argsort(-row)[:2] for label, row in zip(y, s, strict=True)])
    ),
    "calibration_error": lambda y, p, s: _calibration_error(y, p, s.max(1)),
}


def _calibration_error(true, predicted, confidence, bins=15):
    error, edges = 0.0, np.linspace(0, 1, bins + 1)
    for low, high in itertools.pairwise(edges):
        inside = (confidence >= low) & ((confidence < high) | (high == 1))
        if inside.any():
            gap = np.mean(true[inside] == predicted[inside]) - confidence[inside].mean()
            error += inside.mean() * abs(gap)
    return error


def answers(classes: int, seed: int, absent: int = 0):
    """Logits that are right more often than by chance; the last `absent` classes have no sample."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(classes - absent))
    targets = rng.choice(classes - absent, SAMPLES, p=shares)
    logits = rng.normal(size=(SAMPLES, classes)) + 1.5 * np.eye(classes)[targets]
    return torch.from_numpy(logits), torch.from_numpy(targets)


def value(name, counts):
    return value_of(measure_of(name), counts)


def interval(name, counts):
    return interval_of(measure_of(name), counts)


def tallied(measures: Measures, logits, targets, batch=64, exchange=None):
    tally = Tally(measures.classes, torch.device("cpu"), measures.further)
    for start in range(0, len(targets), batch):
        tally.add(logits[start : start + batch], targets[start : start + batch])
    return tally.counts(exchange or Exchange())


@pytest.mark.parametrize(("classes", "absent"), [(2, 0), (4, 0), (7, 3)])
def test_values_are_those_of_scikit_learn(classes, absent):
    logits, targets = answers(classes, classes, absent)
    names = [name for name in REFERENCES if name != "accuracy"]
    if classes == 2:
        names.remove("top2_accuracy")  # always 100 %
    counts = tallied(Measures(classes, names), logits, targets)
    scores = torch.softmax(logits.float(), 1).numpy()
    values = Measures(classes, names).values(counts, Exchange())
    found = {measure.name: value for measure, value in values.items()}
    for name in names:
        expected = REFERENCES[name](targets.numpy(), scores.argmax(1), scores)
        assert found[name] == pytest.approx(expected, rel=1e-6), name


class Half(Exchange):
    """This process has one half of the samples, and its other rank the other one."""

    size = 2

    def __init__(self, other):
        self.other = iter(other)

    def sum(self, tensor):
        return tensor + next(self.other)

    def gather(self, tensor):
        return [tensor, next(self.other)]


def test_ranks_count_together():
    logits, targets = answers(3, 5)
    names = ["top2_accuracy", "f1_macro", "calibration_error", "roc_auc_ovr"]
    whole = tallied(Measures(3, names), logits, targets)

    class Recorder(Exchange):
        def __init__(self):
            self.given = []

        def sum(self, tensor):
            self.given.append(tensor.clone())
            return tensor

        def gather(self, tensor):
            if tensor.dim():  # as long as the longer one
                padded = tensor.new_zeros(200, *tensor.shape[1:])
                padded[: len(tensor)] = tensor
                tensor = padded
            self.given.append(tensor)
            return [tensor]

    recorder = Recorder()
    tallied(Measures(3, names), logits[200:], targets[200:], exchange=recorder)
    both = tallied(Measures(3, names), logits[:200], targets[:200], exchange=Half(recorder.given))
    for name in names:
        assert value(name, both) == pytest.approx(value(name, whole), rel=1e-12)
    assert both["hits"].sum() == both["confusions"].sum() == len(both["scores"]) == SAMPLES


def test_a_measure_without_meaning_is_undefined():
    logits, targets = torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)
    counts = tallied(Measures(3, ["roc_auc_ovr", "cohen_kappa"]), logits, targets)
    assert value("roc_auc_ovr", counts) is None and interval("roc_auc_ovr", counts) is None
    logits[0, 0] = math.nan  # the model has diverged
    counts = tallied(Measures(3, ["average_precision", "calibration_error"]), logits, targets)
    assert value("average_precision", counts) is None
    assert value("calibration_error", counts) is None


def test_wilson_intervals():
    # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I
    assert wilson_interval(81, 263) == pytest.approx((25.53, 36.62), abs=1e-2)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 16.11), abs=1e-2)
    assert wilson_interval(29, 29) == pytest.approx((88.30, 100.0), abs=1e-2)
    assert wilson_interval(0, 0) == (0.0, 100.0)


@pytest.mark.slow
def test_intervals_hold_the_value_and_shrink_with_the_samples():
    names = ["f1_macro", "cohen_kappa", "roc_auc_ovr"]
    logits, targets = answers(3, 8)
    few = tallied(Measures(3, names), logits[:60], targets[:60])
    many = tallied(Measures(3, names), logits, targets)
    for name in names:
        widths = []
        for counts in (few, many):
            low, high = interval(name, counts)
            assert low <= value(name, counts) <= high
            widths.append(high - low)
        # The square root of 5 times as narrow, but for chance.
        assert 1.5 < widths[0] / widths[1] < 3.5


def test_the_bootstrap_finds_the_wilson_interval():
    """Balanced accuracy is accuracy where all classes are equally frequent."""
    targets = torch.arange(400) % 2
    logits = torch.eye(2)[targets]
    logits[:80] = 1 - logits[:80]
    counts = tallied(Measures(2, ["balanced_accuracy"]), logits, targets)
    low, high = wilson_interval(320, 400)
    assert interval("balanced_accuracy", counts) == pytest.approx((low, high), abs=1)


def test_what_is_usual():
    equal = np.repeat(np.arange(3), 10)
    assert usual_measures(equal, 3) == []
    assert usual_measures(np.r_[equal, [0] * 5], 3) == []
    assert usual_measures(np.r_[equal, [0] * 6], 3) == ["f1_macro"]
    assert usual_measures(np.arange(100), 100) == ["top5_accuracy"]


def test_names():
    assert names_in("macro_f1, top_3,acc5,AUROC,f1") == [
        "f1_macro", "top3_accuracy", "top5_accuracy", "roc_auc_ovr",
    ]  # fmt: skip
    assert set(names_in("all")) == set(MEASURES) - {"accuracy", "loss"}
    others = {"top1": "accuracy", "log_loss": "loss", "eval_f1": "f1_macro", "eval_loss": "loss"}
    others |= {"accuracy_top5": "top5_accuracy", "top_1_accuracy": "accuracy"}
    assert {name: canonical_name(name) for name in others} == others
    for name in ("f1_makro", "top0"):
        with pytest.raises(UserError, match=f"--best_by {name}: the measures are .*f1_macro, f1_w"):
            canonical_name(name, "--best_by")


def test_what_is_always_right_is_refused():
    assert [measure.k for measure in Measures(3, ["top2_accuracy"]).further] == [2]
    for name in ("top3_accuracy", "top5_accuracy"):
        with pytest.raises(UserError, match=f"{name}: with 3 classes it is always 100 %: leave it"):
            Measures(3, [name])


def test_a_measure_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def cost(targets, probabilities):\n"
        "    return (probabilities.argmax(1) != targets).mean()\n"
        "cost.greater_is_better = False\n"
        "def broken(targets, probabilities):\n    return targets.nothing\n"
    )
    logits, targets = answers(3, 2)
    measures = Measures(3, [f"{path}:cost"])
    (found,) = measures.values(tallied(measures, logits, targets), Exchange()).values()
    assert found == pytest.approx((logits.argmax(1) != targets).double().mean().item())
    assert not measures.measure(f"{path}:cost").rises
    with pytest.raises(UserError, match=r"has no function named mine; it has cost, broken"):
        Measures(3, [f"{path}:mine"])
    for names in (["f1_macro"], ["loss"], ["step"], ["top2_accuracy"], ["cost"]):
        other = tmp_path / f"other_{names[0]}.py"
        other.write_text(f"def {names[0]}(targets, probabilities):\n    return 0.0\n")
        with pytest.raises(UserError, match="has this name; give the function another one"):
            Measures(3, ["top2_accuracy", f"{path}:cost", f"{other}:{names[0]}"])
    broken = Measures(3, [f"{path}:broken"])
    with pytest.raises(UserError, match=r"failed in line 5: AttributeError.*it takes the true"):
        broken.values(tallied(broken, logits, targets), Exchange())
