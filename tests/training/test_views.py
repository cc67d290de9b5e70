"""Evaluation by averages over views: its figures by hand, apart from the plain ones."""

import numpy as np
import pytest
import torch
from torch import nn
from toy import loader, network, pictures

from utils.fused import fuse
from utils.measures.measures import Measures
from utils.models.resnet import ResNet
from utils.training.evaluation import evaluate
from utils.training.objective import Precision
from utils.training.views import PASSES, mean_log_probabilities, views_of

CPU = torch.device("cpu")
FP32, BF16 = Precision("fp32", CPU), Precision("bf16", CPU)
SAMPLES = 23


def measured_split(batch_size=5):
    return loader(batch_size, n=SAMPLES, augment=False, shuffle=False)


def inputs_and_labels(dtype=torch.float64):
    images, labels = pictures(SAMPLES)
    inputs = torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2).contiguous()
    return (inputs / 255 - 0.5) / 0.25, labels


def by_hand(logits: list[np.ndarray], weights, labels: np.ndarray) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of the mean probabilities, in float64."""
    p = [np.exp(z - z.max(1, keepdims=True)) for z in logits]
    mean = sum(w * each / each.sum(1, keepdims=True) for w, each in zip(weights, p, strict=True))
    correct = mean.argmax(1) == labels
    return -np.log(mean[np.arange(len(labels)), labels]).mean(), 100 * correct.mean()


def seen(x: np.ndarray, views: str) -> tuple[list, list[float]]:
    """The views of pictures (n, channels, height, width) and their weights, pixel by pixel."""

    def moved(by: int) -> np.ndarray:
        def reflected(i, size):
            return min(abs(i + by), 2 * (size - 1) - i - by)

        rows = [reflected(i, x.shape[2]) for i in range(x.shape[2])]
        columns = [reflected(i, x.shape[3]) for i in range(x.shape[3])]
        return x[:, :, rows][:, :, :, columns]

    shifted, flipped = [moved(1), moved(-1)], lambda some: [one[..., ::-1] for one in some]
    return {
        "none": ([x], [1]),
        "mirror": ([x, x[..., ::-1]], [1 / 2] * 2),
        "shift": ([x, *shifted], [1 / 2, 1 / 4, 1 / 4]),
        "both": ([x, *shifted, *flipped([x, *shifted])], [1 / 4, 1 / 8, 1 / 8] * 2),
    }[views]


@pytest.mark.parametrize("views", PASSES)
def test_views_equal_those_made_pixel_by_pixel(views):
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = views_of(x, views)
    assert found[0][1] is x and len(found) == PASSES[views] and sum(w for w, _ in found) == 1
    assert all(one.is_contiguous(memory_format=torch.channels_last) for _, one in found)
    expected = sorted((w, one.tolist()) for one, w in zip(*seen(x.numpy(), views), strict=True))
    assert sorted((w, one.tolist()) for w, one in found) == expected


@pytest.mark.parametrize(
    ("views", "batch_size"), [("mirror", 1), ("mirror", 5), ("shift", 5), ("both", 23)]
)
def test_equals_plain_float64(views, batch_size):
    model = network(dropout=0.5)
    model(inputs_and_labels(torch.float32)[0])  # running statistics
    plain = evaluate(model, measured_split(batch_size).epoch(), FP32)
    result = evaluate(model, measured_split(batch_size).epoch(), FP32, views=views)
    assert result.figures == plain.figures and plain.views_figures == {}
    exact, (inputs, labels) = network(dropout=0.5).double().eval(), inputs_and_labels()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        each, weights = seen(inputs.numpy(), views)
        logits = [exact(torch.from_numpy(x.copy())).numpy() for x in each]
    loss, accuracy = by_hand(logits, weights, labels)
    assert result.views_figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.views_figures["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert abs(result.views_loss - result.loss) > 1e-5  # this model sees a difference
    assert model.training


def test_a_symmetric_model_has_the_same_figures():
    class Symmetric(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x) + self.inner(x.flip(3))

    result = evaluate(Symmetric(), measured_split().epoch(), FP32, views="mirror")
    assert result.views_accuracy == result.accuracy
    assert result.views_loss == pytest.approx(result.loss, rel=1e-6)


def test_a_probability_of_zero_is_no_infinite_loss():
    """Where a single one of the two is 0 in float32."""
    picture, logits = torch.zeros(1, 1, 2, 2), torch.tensor([[0.0, 200.0]])
    found = mean_log_probabilities(lambda x: torch.zeros(1, 2), picture, logits, "mirror")
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75]]).log())
    assert mean_log_probabilities(lambda x: logits, picture, logits, "both").isfinite().all()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
def test_fused_modules_and_bf16(fused, precision):
    torch.manual_seed(0)
    model = ResNet(18, 3, width=4).to(memory_format=torch.channels_last)
    model = fuse(model, fused)
    images, labels = inputs_and_labels(torch.float32)
    model(images.to(memory_format=torch.channels_last))
    measures = Measures(3, ["f1_macro"])
    found = evaluate(model, measured_split().epoch(), precision, measures=measures, views="mirror")
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
    loss, accuracy = by_hand(logits, [0.5, 0.5], labels)
    assert found.views_loss == pytest.approx(loss, rel=1e-5)
    assert found.views_accuracy == pytest.approx(accuracy)
