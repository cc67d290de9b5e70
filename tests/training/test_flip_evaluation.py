"""Evaluation with mirror images: its figures by hand, apart from the plain ones."""

import numpy as np
import pytest
import torch
from torch import nn
from toy import loader, network, pictures

from utils.fused import fuse
from utils.measures.measures import Measures
from utils.models.resnet import ResNet
from utils.training.evaluation import evaluate, mean_log_probabilities
from utils.training.objective import Precision

CPU = torch.device("cpu")
FP32, BF16 = Precision("fp32", CPU), Precision("bf16", CPU)
SAMPLES = 23


def measured_split(batch_size=5):
    return loader(batch_size, n=SAMPLES, augment=False, shuffle=False)


def inputs_and_labels(dtype=torch.float64):
    images, labels = pictures(SAMPLES)
    inputs = torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2).contiguous()
    return (inputs / 255 - 0.5) / 0.25, labels


def by_hand(logits: np.ndarray, mirrored: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of the mean probabilities, in float64."""
    p = [np.exp(z - z.max(1, keepdims=True)) for z in (logits, mirrored)]
    mean = sum(each / each.sum(1, keepdims=True) for each in p) / 2
    correct = mean.argmax(1) == labels
    return -np.log(mean[np.arange(len(labels)), labels]).mean(), 100 * correct.mean()


@pytest.mark.parametrize("batch_size", [1, 5, 23])
def test_equals_plain_float64(batch_size):
    model = network(dropout=0.5)
    model(inputs_and_labels(torch.float32)[0])  # running statistics
    plain = evaluate(model, measured_split(batch_size).epoch(), FP32)
    result = evaluate(model, measured_split(batch_size).epoch(), FP32, flip=True)
    assert result.figures == plain.figures and plain.flip_figures == {}
    exact, (inputs, labels) = network(dropout=0.5).double().eval(), inputs_and_labels()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = [
            exact(x).numpy() for x in (inputs, torch.from_numpy(inputs.numpy()[..., ::-1].copy()))
        ]
    loss, accuracy = by_hand(*logits, labels)
    assert result.flip_figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.flip_figures["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert abs(result.flip_loss - result.loss) > 1e-4  # mirrored, this model answers otherwise
    assert model.training


def test_a_symmetric_model_has_the_same_figures():
    class Symmetric(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x) + self.inner(x.flip(3))

    result = evaluate(Symmetric(), measured_split().epoch(), FP32, flip=True)
    assert result.flip_accuracy == result.accuracy
    assert result.flip_loss == pytest.approx(result.loss, rel=1e-6)


def test_a_probability_of_zero_is_no_infinite_loss():
    """Where a single one of the two is 0 in float32."""
    logits, others = torch.tensor([[0.0, 200.0]]), torch.tensor([[0.0, 0.0]])
    found = mean_log_probabilities(logits, others)
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75]]).log())
    assert mean_log_probabilities(logits, logits).isfinite().all()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
def test_fused_modules_and_bf16(fused, precision):
    torch.manual_seed(0)
    model = ResNet(18, 3, width=4).to(memory_format=torch.channels_last)
    model = fuse(model, fused)
    images, labels = inputs_and_labels(torch.float32)
    model(images.to(memory_format=torch.channels_last))
    measures = Measures(3, ["f1_macro"])
    found = evaluate(model, measured_split().epoch(), precision, measures=measures, flip=True)
    matrix = found.counts["confusions"]
    assert matrix.trace() == round(found.accuracy * SAMPLES / 100)  # of the plain answers
    model.eval()
    # The loader's own inputs: those of another formula may round to other bf16 numbers.
    batches = [batch.inputs for batch in measured_split().epoch()]
    mirrored = [inputs.flip(-1) for inputs in batches]
    with torch.inference_mode(), precision.autocast():
        logits = [
            torch.cat([model(inputs) for inputs in part]).double().numpy()
            for part in (batches, mirrored)
        ]
    loss, accuracy = by_hand(*logits, labels)
    assert found.flip_loss == pytest.approx(loss, rel=1e-5)
    assert found.flip_accuracy == pytest.approx(accuracy)


def test_mirror_images_keep_the_memory_order():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return x.mean((2, 3))

    evaluate(Watch(), measured_split(23).epoch(), FP32, flip=True)
    assert seen == [True, True]
