"""Gradients, statistics and random numbers of ONNX Runtime against PyTorch's in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ort_models import CLASSES, MODELS, pictures, resnet, texts, transformer, vit
from torch import nn

from utils.engines.ort.module import OrtModule, relative_difference
from utils.mixup.mixing import MixPlan
from utils.training.controls import Freeze


def gradients(called: nn.Module, model: nn.Module, inputs, *plan) -> list[torch.Tensor]:
    """Of a loss with the parameters of `model`."""
    logits = called(inputs, *plan)
    targets = torch.arange(len(logits)) % CLASSES
    return list(torch.autograd.grad(F.cross_entropy(logits, targets), [*model.parameters()]))


def compared(model: nn.Module, inputs, *plan) -> tuple[float, float]:
    """Relative errors against float64: of ONNX Runtime, and of PyTorch in float32."""
    exact = copy.deepcopy(model).double()
    floating = isinstance(inputs, torch.Tensor) and inputs.is_floating_point()
    of_exact = gradients(exact, exact, inputs.double() if floating else inputs, *plan)
    plain, said = copy.deepcopy(model), []
    ours = gradients(OrtModule(model, said.append), model, inputs, *plan)
    assert len(said) == 1 and "are within" in said[0]
    theirs = gradients(plain, plain, inputs, *plan)
    return relative_difference(ours, of_exact), relative_difference(theirs, of_exact)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_float64_within_float32_noise(name):
    torch.manual_seed(1)
    build, batch = MODELS[name]
    ours, theirs = compared(build().train(), batch())
    assert ours < 4 * theirs + 1e-6


@pytest.mark.parametrize("place", ["sentence", "embeddings"])
def test_a_model_that_mixes_inside(place):
    torch.manual_seed(1)
    plan = MixPlan(torch.tensor([2, 0, 1, 3]), torch.tensor([0.3, 1.0, 0.0, 0.6]))
    ours, theirs = compared(transformer(mixup_at=place).train(), texts(3, 7, 12, 2), plan)
    assert ours < 4 * theirs + 1e-6


def test_statistics_of_batch_norm_are_those_of_pytorch():
    """Over several steps with batches of several sizes; the unbiased variance, and the count."""
    torch.manual_seed(0)
    model = resnet().train()
    exact, ours = copy.deepcopy(model).double(), OrtModule(model, lambda line: None)
    for step, n in enumerate((8, 8, 3)):
        batch = pictures(n, seed=step)
        ours(batch).sum().backward()
        exact(batch.double())
    for (name, found), expected in zip(model.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=1e-5, atol=1e-6, msg=name
        )
    assert len(ours._graphs) == 1


class NormAct(nn.BatchNorm2d):
    """BatchNorm and its activation, as in timm."""

    def forward(self, x):
        return F.relu(super().forward(x))


def test_a_frozen_batch_norm_keeps_its_activation():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), NormAct(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
    )
    Freeze(model, ("4",)).apply(0)
    assert not model[1].training
    batch, plain = pictures(4), F.batch_norm
    logits = OrtModule(model, lambda line: None)(batch)
    torch.testing.assert_close(logits, model(batch), rtol=1e-4, atol=1e-5)
    assert F.batch_norm is plain


class Pieces(nn.Module):
    """A BatchNorm whose input has several rows for each sample."""

    def __init__(self):
        super().__init__()
        self.bn, self.out = nn.BatchNorm1d(48), nn.Linear(48, CLASSES)

    def forward(self, x):
        rows = self.bn(x.reshape(-1, 48))
        return self.out(rows.reshape(x.shape[0], -1, 48).mean(1))


class Words(nn.Module):
    """A BatchNorm over the words of texts, which are longer or shorter from batch to batch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bn = nn.Embedding(50, 8), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.out(self.bn(self.embedding(ids).transpose(1, 2)).mean(2))


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (Pieces(), [pictures(8), pictures(2)]),
        (Words(), [torch.arange(12).view(4, 3), torch.arange(40).view(2, 20)]),
    ],
)
def test_statistics_over_any_number_of_values(model, batches):
    """The unbiased variance depends on that number, not on the number of samples."""
    exact, ours = copy.deepcopy(model).double(), OrtModule(model.train(), lambda line: None)
    for batch in batches:
        ours(batch)
        exact(batch.double() if batch.is_floating_point() else batch)
    torch.testing.assert_close(
        model.bn.running_var.double(), exact.bn.running_var, rtol=1e-5, atol=1e-6
    )
    assert len(ours._graphs) == 1


def test_the_start_leaves_no_trace():
    """The comparison changes neither buffers nor random states."""
    model = resnet().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    OrtModule(model, lambda line: None)._tried({"inputs": pictures(4)})
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_repeats_with_the_seed_and_has_its_own_gradient():
    """logits = mask z / (1 - rate), so the gradient of their sum by the bias is the sum of mask /
    (1 - rate)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, CLASSES), nn.Dropout(0.25)).train()
    ours, batch, found = OrtModule(model, lambda line: None), pictures(400), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        logits = ours(batch)
        model.zero_grad()
        logits.sum().backward()
        factors = logits.detach() / model[:2](batch).detach()
        torch.testing.assert_close(model[1].bias.grad, factors.sum(0), rtol=1e-4, atol=1e-3)
        found.append(logits)
    kept = (factors > 0).float()
    torch.testing.assert_close(factors, kept / 0.75, rtol=1e-3, atol=1e-3)
    assert abs(kept.mean() - 0.75) < 0.03
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_texts_of_other_numbers_and_lengths_take_the_same_graph():
    torch.manual_seed(0)
    model = transformer().train()
    ours = OrtModule(model, lambda line: None)
    for lengths in ((3, 7, 1), (12, 2, 5, 20), (4,)):
        batch = texts(*lengths)
        torch.testing.assert_close(ours(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert len(ours._graphs) == 1


def test_what_trains_may_change():
    """As with --freeze_backbone and --unfreeze_epoch: first the head alone, then all."""
    torch.manual_seed(0)
    model = resnet().train()
    freeze = Freeze(model, ("fc",), until=1)
    said: list[str] = []
    ours = OrtModule(model, said.append)
    for epoch, trained in ((0, {"fc.weight", "fc.bias"}), (1, {*dict(model.named_parameters())})):
        freeze.apply(epoch)
        plain = copy.deepcopy(model)
        for called in (ours, plain):
            F.cross_entropy(called(pictures(6)), torch.arange(6) % CLASSES).backward()
        for (name, found), (_, expected) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert (found.grad is not None) is (name in trained)
            if name in trained:
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)
        for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, expected)
        model.zero_grad()
    assert len(said) == 2


def test_a_forward_pass_without_a_backward_pass_is_forgotten():
    model = vit().train()
    ours = OrtModule(model, lambda line: None)
    for seed in range(3):
        logits = ours(pictures(2, seed=seed))
    torch.testing.assert_close(logits, model(pictures(2, seed=2)), rtol=1e-4, atol=1e-5)
    logits.sum().backward()
    assert model.head.weight.grad is not None
