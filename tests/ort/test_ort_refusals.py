"""Models that ONNX Runtime cannot train are refused before the first step."""

import pytest
import torch
import torch.nn.functional as F
from ort_models import pictures
from torch import nn

from utils.engines.ort import export, module
from utils.engines.ort.module import OrtModule
from utils.engines.ort.session import TrainingSession
from utils.errors import UserError
from utils.models.resnet import DropPath


def network(*layers: nn.Module) -> nn.Module:
    """For pictures of 16 x 16, of 4 channels after a first convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


def refusal(model: nn.Module, batch: torch.Tensor | None = None) -> str:
    with pytest.raises(UserError) as caught:
        OrtModule(model.train(), lambda line: None)(pictures(4) if batch is None else batch)
    text = str(caught.value)
    assert text.startswith("--engine ort: ") and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.AvgPool2d(2), "AveragePool"),
        (DropPath(0.5), "Random"),
        (nn.Hardswish(), "HardSwish"),
        (nn.PReLU(), "PRelu"),
        (nn.ELU(), "Elu"),
        (nn.GroupNorm(2, 4), "InstanceNormalization"),
        (nn.ConvTranspose2d(4, 4, 2), "ConvTranspose"),
    ],
)
def test_the_operator_is_named(layer, named):
    assert named in refusal(network(layer))


def test_an_operator_that_would_end_the_process_ends_another_one(monkeypatch):
    """As AveragePool does, were it not refused by name."""
    monkeypatch.delitem(export.REFUSED, "AveragePool")
    assert "was ended by SIGFPE" in refusal(network(nn.AvgPool2d(2)))


def test_a_step_that_does_not_end(monkeypatch):
    monkeypatch.setattr("utils.engines.ort.session.PATIENCE", 0.01)
    assert "had not ended after 0.01 seconds" in refusal(network(nn.ReLU()))


def test_a_temporary_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "set TMPDIR to another folder" in refusal(network(nn.ReLU()))


class Attention(nn.Module):
    """Self-attention of pixels, with PyTorch's own dropout."""

    def forward(self, x):
        pixels = x.flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(
            pixels, pixels, pixels, dropout_p=0.5 if self.training else 0.0
        ).transpose(1, 2).view(x.shape)  # fmt: skip


def test_dropout_that_the_graph_would_leave_out():
    assert "scaled_dot_product_attention with dropout" in refusal(network(Attention()))


def test_a_refusal_is_all_that_is_printed(capfd):
    """The exporter would print the graph."""
    assert "feature_dropout" in refusal(network(nn.Dropout2d(0.5)))
    assert capfd.readouterr() == ("", "")


class Centered(nn.Module):
    """Takes the number of samples as a number of Python, which the graph keeps."""

    def forward(self, x):
        return x - x.sum(0) / len(x)


class Rows(nn.Module):
    """As above; with another number of samples the rows get another width."""

    def forward(self, x):
        return x.reshape(len(x), -1, 16, 16)


class Average(nn.Module):
    """Takes the length of texts as a number of Python."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.out(self.embedding(ids).sum(1) / int(ids.shape[1]))


def test_a_graph_for_a_single_batch_size_is_refused(capfd):
    assert "differ from float64's" in refusal(network(Centered()))
    assert "cannot train this model" in refusal(network(Rows()))
    assert capfd.readouterr() == ("", "")


def test_a_graph_for_a_single_length_of_texts_is_refused():
    assert "differ from float64's" in refusal(Average(), torch.arange(12).view(2, 6))


def test_wrong_gradients_are_refused(monkeypatch):
    backward = TrainingSession.backward
    monkeypatch.setattr(
        TrainingSession,
        "backward",
        lambda self, gradient, state: backward(self, 1.1 * gradient, state),
    )
    assert "differ from float64's by 1.0e-01" in refusal(network(nn.ReLU()))


def test_one_difference_by_chance_is_no_refusal(monkeypatch):
    """Of the first samples; those at the other end of the batch agree."""
    found = module.relative_difference
    # ONNX Runtime's and PyTorch's, each of gradients and statistics, of the first samples
    errors = [0.5, 0.0, 0.0, 0.0]
    monkeypatch.setattr(
        module, "relative_difference", lambda *steps: errors.pop(0) if errors else found(*steps)
    )
    said = []
    OrtModule(network(nn.ReLU()).train(), said.append)(pictures(20))
    assert not errors and "of a step with 8 samples are within" in said[0]


def test_wrong_statistics_are_refused(monkeypatch):
    monkeypatch.setattr("utils.engines.ort.graph.update_statistics", lambda *arguments: None)
    assert "differ from float64's" in refusal(network(nn.BatchNorm2d(4)))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_without_statistics(training):
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    norm.train = lambda mode=True: norm  # stays as it is
    norm.training = training
    assert "the BatchNorm 1 has no running statistics" in refusal(network(norm))


def test_a_batch_norm_with_a_cumulative_average():
    assert "momentum" in refusal(network(nn.BatchNorm2d(4, momentum=None)))


def test_a_batch_norm_that_is_called_twice():
    norm = nn.BatchNorm2d(4)
    assert "called twice" in refusal(network(norm, nn.ReLU(), norm))


class Counter(nn.Module):
    """Counts its calls in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


def test_a_buffer_that_training_changes():
    """In evaluation mode, in which gradients are compared, it stays the same."""
    assert "changes its buffer 1.calls" in refusal(network(Counter()))
