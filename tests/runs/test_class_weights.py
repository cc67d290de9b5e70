"""Weights of classes from their counts or from a file, and what a run says of its classes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.errors import UserError
from utils.runs.class_balance import class_balance, class_weights, read_weights
from utils.settings import ImageSettings

CLASSES = ("cat", "dog", "owl", "eft")
COUNTS = np.array([700, 200, 80, 20])


def run_of(counts=COUNTS, resumed_with=..., **settings):
    """(the loss, the lines that are printed) of a run with these training samples.

    Args:
        resumed_with: the weights in the checkpoint; without it a new run.
    """
    said = []
    run = SimpleNamespace(
        settings=ImageSettings(**settings),
        console=SimpleNamespace(say=said.append),
        device=torch.device("cpu"),
    )
    labels = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    task = SimpleNamespace(
        card=SimpleNamespace(classes=CLASSES[: len(counts)]), train=SimpleNamespace(labels=labels)
    )
    checkpoint = None
    if resumed_with is not ...:
        checkpoint = SimpleNamespace(run_info={"class_weights": resumed_with})
    return class_balance(run, task, checkpoint), said


def test_balanced_weights_are_those_of_scikit_learn():
    expected = COUNTS.sum() / (len(COUNTS) * COUNTS)
    np.testing.assert_allclose(class_weights("balanced", COUNTS, CLASSES), expected, rtol=1e-6)


def test_weights_by_the_root_have_a_mean_of_one_over_the_samples():
    weights = class_weights("sqrt", COUNTS, CLASSES).double().numpy()
    np.testing.assert_allclose(weights * np.sqrt(COUNTS), weights[0] * np.sqrt(700), rtol=1e-6)
    assert weights @ COUNTS / 1000 == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", ["balanced", "sqrt"])
def test_weights_of_equal_classes_are_one_to_the_bit(name):
    assert (class_weights(name, np.full(4, 37), CLASSES) == 1).all()


FILES = {
    "w.yaml": "cat: 1\ndog: 2\nowl: 1e0\neft: 0\n",
    "w.yml": "{eft: 0, owl: 1, dog: 2.0, cat: 1}",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_weight_of_each_class(tmp_path, name):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    assert read_weights(tmp_path / name, CLASSES).tolist() == [1, 2, 1, 0]
    found = class_weights(str(tmp_path / name), COUNTS, CLASSES)
    np.testing.assert_allclose(found, np.array([1, 2, 1, 0]) / 1.18, rtol=1e-6)


def test_names_that_yaml_takes_for_something_else(tmp_path):
    (tmp_path / "w.yaml").write_text("yes: 1\nno: 2\n1: 3\n1e3: 4\ncafe\u0301: 5\n<<: 6")
    classes = ("yes", "no", "1", "1e3", "caf\u00e9", "<<")
    assert read_weights(tmp_path / "w.yaml", classes).tolist() == [1, 2, 3, 4, 5, 6]


WRONG = {
    "unknown": ("cat: 1\ndogs: 2", "no class 'dogs'; there are 'cat', 'dog'"),
    "missing": ("cat: 1\nowl: 2", "no weight for 'dog', 'eft'; add a line for each"),
    "negative": ("cat: -1", "the weight of 'cat' is '-1'; give a number, 0 or more"),
    "infinite": ("cat: .inf", "the weight of 'cat' is '.inf'"),
    "not a number": ("cat: nan", "the weight of 'cat' is 'nan'"),
    "a text": ("cat: much", "the weight of 'cat' is 'much'"),
    "a list": ("cat: [1]", "the weight of 'cat' is ['1']"),
    "nothing but zeros": (
        "{cat: 0, dog: 0, owl: 0, eft: 0}",
        "give a class with training samples more than 0",
    ),
    "twice": ("cat: 1\ncat: 1", "cat is there twice"),
    "no lines": ("cat", "a line for each class is needed, as in cat: 2.5"),
    "empty": ("", "a line for each class is needed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_a_line(tmp_path, case):
    text, message = WRONG[case]
    path = tmp_path / "w.yaml"
    path.write_text(text + ("\ndog: 1\nowl: 1\neft: 1" if "weight of" in message else ""))
    with pytest.raises(UserError) as error:
        class_weights(str(path), COUNTS, CLASSES)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"--class_weights {path}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        class_weights(str(tmp_path / "w.yaml"), COUNTS, CLASSES)


@pytest.mark.parametrize("flag", [{"class_weights": "sqrt"}, {"logit_adjustment": 1.0}])
def test_a_class_without_training_samples_has_neither_weight_nor_prior(flag):
    with pytest.raises(UserError, match=r"'dog' has no training sample, which --.* needs: add"):
        run_of(np.array([10, 0, 8]), **flag)


def test_priors_are_those_of_the_training_samples():
    balance, _ = run_of(logit_adjustment=0.5, label_smoothing=0.1)
    expected = 0.5 * np.log(COUNTS / 1000)
    np.testing.assert_allclose(balance.logit_shift.numpy(), expected, rtol=1e-6)
    assert balance.weights is None and balance.label_smoothing == 0.1


def test_a_run_without_these_flags_has_plain_cross_entropy():
    assert run_of() == (None, run_of()[1])
    assert run_of(class_sampler="balanced")[0] is None


def test_classes_that_differ_are_said_once():
    _, said = run_of()
    assert said == [
        "note: class 'cat' has 700 training samples and class 'eft' 20: so that small classes "
        "count for more, try --class_sampler balanced, then --class_weights sqrt"
    ]
    assert run_of(np.array([100, 20, 30, 40]))[1] == []  # 5 to 1
    assert run_of(resumed_with=None)[1] == []
    for flag in (
        {"class_weights": "sqrt"},
        {"class_sampler": "balanced"},
        {"focal_gamma": 2.0},
        {"logit_adjustment": 1.0},
    ):
        assert run_of(**flag)[1] == []


def test_two_corrections_of_the_same_are_said():
    _, said = run_of(class_sampler="balanced", class_weights="sqrt", focal_gamma=2.0)
    assert said == [
        "note: each of --class_sampler and --class_weights corrects for how many samples a class "
        "has, so together they correct too much: keep one of them"
    ]


def test_weights_that_change_nothing_are_left_out():
    balance, said = run_of(np.full(4, 9), class_weights="balanced")
    assert balance is None
    assert said == ["note: --class_weights balanced: all classes weigh the same, as without it"]


def test_a_resumed_run_keeps_its_weights(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("cat: 1\ndog: 2\nowl: 3\neft: 4")
    weights = run_of(class_weights=str(path))[0].weights.tolist()
    balance, said = run_of(class_weights=str(path), resumed_with=weights)
    assert balance.weights.tolist() == weights and not said
    path.write_text("cat: 1\ndog: 2\nowl: 3\neft: 5")
    with pytest.raises(UserError, match="started with other weights"):
        run_of(class_weights=str(path), resumed_with=weights)
