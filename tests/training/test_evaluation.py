"""Evaluation: every sample once, with running statistics, and without a trace in the model."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from utils.exchange import Exchange
from utils.measures.measures import Measures
from utils.training.evaluation import evaluate
from utils.training.objective import Precision

FP32 = Precision("fp32", torch.device("cpu"))
SAMPLES = 11


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    filler: bool = False


def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    nn.init.normal_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    return model, torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,))


def batches(inputs, targets, size):
    return [Batch(inputs[i : i + size], targets[i : i + size]) for i in range(0, SAMPLES, size)]


def reference(model, inputs, targets):
    """Mean cross-entropy and accuracy in float64, with the running statistics, no dropout."""
    w = {key: value.double().numpy() for key, value in model.state_dict().items()}
    x = inputs.double().numpy() @ w["0.weight"].T + w["0.bias"]
    x = (x - w["1.running_mean"]) / np.sqrt(w["1.running_var"] + 1e-5)
    logits = (x * w["1.weight"] + w["1.bias"]) @ w["3.weight"].T + w["3.bias"]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    correct = logits.argmax(1) == targets.numpy()
    return -log_p[np.arange(SAMPLES), targets.numpy()].mean(), 100 * correct.mean()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10, 11, 50])
def test_each_sample_counts_once_at_any_batch_size(size):
    model, inputs, targets = task()
    loss, accuracy = reference(model, inputs, targets)
    result = evaluate(model, batches(inputs, targets, size), FP32)
    assert result.samples == SAMPLES
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.accuracy == pytest.approx(accuracy, rel=1e-12)


class OneOfTwo(Exchange):
    """A rank whose partner has no samples."""

    size = 2


@pytest.mark.parametrize("views", ["none", "mirror"])
def test_fillers_do_not_count(views):
    """They let all ranks run equally many passes."""
    model, inputs, targets = task()
    own = batches(inputs, targets, 4)
    measures = Measures(3, ["f1_macro"])
    expected = evaluate(model, own, FP32, measures=measures, views=views)
    filled = [*own, own[0]._replace(filler=True)]
    found = evaluate(model, filled, FP32, measures=measures, exchange=OneOfTwo(), views=views)
    assert (found.figures, found.views_figures) == (expected.figures, expected.views_figures)
    assert np.array_equal(found.counts["confusions"], expected.counts["confusions"])


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_the_model_as_it_was(training):
    model, inputs, targets = task()
    model.train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluate(model, batches(inputs, targets, 4), FP32)
    assert model.training is training and model[1].training is training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and not p.is_inference() for p in model.parameters())


class Keeper(nn.Linear):
    """It makes its mask in its first pass."""

    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
        return super().forward(x * self.mask)


def test_training_goes_on_with_what_a_model_keeps_of_an_evaluation():
    _, inputs, targets = task()
    model = nn.Sequential(nn.Linear(4, 4), Keeper(4, 3))
    evaluate(model, batches(inputs, targets, 4), FP32)
    model(inputs).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_interrupted_evaluation_returns_none_in_training_mode():
    model, inputs, targets = task()
    answers = iter([False, True])
    assert evaluate(model, batches(inputs, targets, 3), FP32, lambda: next(answers)) is None
    assert model.training


def test_the_model_is_in_training_mode_after_an_error():
    model, _, targets = task()
    with pytest.raises(RuntimeError):
        evaluate(model, [Batch(torch.zeros(SAMPLES, 5), targets)], FP32)
    assert model.training
