"""The objective against cross-entropy written out in float64."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from utils.machine.backends import is_faster_in_bf16
from utils.mixup.mixing import MixPlan
from utils.optim.muon_steps import precision_of
from utils.training.objective import (
    MIXED_SUMS,
    SUMS,
    Classification,
    Precision,
    mixed_cross_entropy,
    resolve_precision,
    why_slow,
)

CPU = torch.device("cpu")


def reference(logits: np.ndarray, targets: np.ndarray, smoothing: float):
    """-sum of q log p over samples and classes, q = (1 - s) one_hot + s / classes; its gradient."""
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    q = np.full_like(log_p, smoothing / logits.shape[1])
    q[np.arange(len(targets)), targets] += 1 - smoothing
    return -(q * log_p).sum(), np.exp(log_p) - q


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_and_gradient_against_float64(smoothing):
    generator = np.random.default_rng(0)
    logits = generator.normal(scale=5, size=(13, 7))
    targets = generator.integers(0, 7, 13)
    loss, gradient = reference(logits, targets, smoothing)
    inputs = torch.from_numpy(logits).requires_grad_()
    objective = Classification(torch.nn.Identity(), Precision("fp32", CPU), smoothing)
    result, sums = objective(inputs, torch.from_numpy(targets))
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(inputs.grad, gradient, atol=1e-12)
    for value in sums.values():
        assert not value.requires_grad and value.dtype == torch.float64
    correct = int((logits.argmax(1) == targets).sum())
    assert {name: value.item() for name, value in sums.items()} == {
        "loss": pytest.approx(loss),
        "correct": correct,
        "samples": 13,
    }


def test_sums_of_parts_are_the_sums_of_the_whole():
    torch.manual_seed(0)
    objective = Classification(torch.nn.Linear(4, 3), Precision("fp32", CPU), 0.1)
    inputs, targets = torch.randn(10, 4), torch.randint(0, 3, (10,))
    whole = objective(inputs, targets)[1]
    parts = [objective(inputs[i : i + 3], targets[i : i + 3])[1] for i in range(0, 10, 3)]
    added = {name: sum(part[name] for part in parts) for name in whole}
    torch.testing.assert_close(added, whole, rtol=1e-6, atol=0)


def test_half_precision_computes_the_loss_in_float32():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    inputs, targets = torch.randn(10, 4), torch.randint(0, 3, (10,))
    seen = []
    model.register_forward_hook(lambda module, given, output: seen.append(output))
    loss, _ = Classification(model, Precision("bf16", CPU))(inputs, targets)
    assert seen[0].dtype == torch.bfloat16 and loss.dtype == torch.float32
    expected, _ = reference(seen[0].detach().double().numpy(), targets.numpy(), 0.0)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_precision_on_a_cpu():
    assert resolve_precision("auto", CPU) == "fp32"
    assert [resolve_precision(name, CPU) for name in ("fp32", "bf16", "fp16")] == [
        "fp32",
        "bf16",
        "fp16",
    ]
    assert Precision("fp16", CPU).scaler().is_enabled()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_fastest_precision_is_that_of_the_instructions(monkeypatch, machine, native):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    arm = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: native)
    monkeypatch.setattr(torch.ops, "mkldnn", arm)
    assert resolve_precision("fastest", CPU) == ("bf16" if native else "fp32")
    assert resolve_precision("fastest", CPU, bf16_helps_cpus=False) == "fp32"
    assert resolve_precision("auto", CPU) == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    gpu = torch.device("cuda")
    assert resolve_precision("fastest", gpu) == resolve_precision("auto", gpu)


@pytest.mark.parametrize("amd", [True, False])
def test_instructions_for_bf16_without_amx_are_fast_on_amd_alone(monkeypatch, amd):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("utils.machine.backends._is_amd", lambda: amd)
    assert is_faster_in_bf16(CPU) == amd
    parameter = torch.zeros(4, 4)
    assert precision_of(parameter) == (torch.bfloat16 if amd else torch.float32)
    assert precision_of(parameter.double()) == torch.float64


@pytest.mark.parametrize("native", [True, False])
def test_a_precision_that_a_cpu_only_emulates_is_slow(monkeypatch, native):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: native)
    slow = [bool(why_slow(name, CPU)) for name in ("fp32", "bf16", "fp16")]
    assert slow == [False, not native, not native]
    assert not why_slow("bf16", torch.device("cuda"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")  # nobody knows
    assert not why_slow("bf16", CPU)
    assert not Precision("bf16", CPU).scaler().is_enabled()


# ---- mixed batches ------------------------------------------------------------------------------


def mixed_reference(logits, targets, partners, lam, smoothing):
    """The loss of each sample by dense targets, and its gradient with respect to the logits."""
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    one_hot = np.eye(logits.shape[1])
    q = lam[:, None] * one_hot[targets] + (1 - lam[:, None]) * one_hot[partners]
    q = (1 - smoothing) * q + smoothing / logits.shape[1]
    return -(q * log_p).sum(1), np.exp(log_p) - q


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_mixed_targets_against_one_hot_float64(smoothing):
    generator = np.random.default_rng(0)
    logits, lam = generator.normal(scale=5, size=(13, 7)), generator.random(13)
    targets, partners = generator.integers(0, 7, (2, 13))
    losses, gradient = mixed_reference(logits, targets, partners, lam, smoothing)
    inputs = torch.from_numpy(logits).requires_grad_()
    result = mixed_cross_entropy(
        inputs, *map(torch.from_numpy, (targets, partners, lam)), smoothing
    )
    np.testing.assert_allclose(result.detach(), losses, rtol=1e-12)
    result.sum().backward()
    np.testing.assert_allclose(inputs.grad, gradient, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_lambda_1_is_no_mixup_to_the_bit(smoothing):
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(200, 10), torch.randint(0, 10, (200,))
    plan = MixPlan(torch.randperm(200), torch.ones(200))
    results = []
    for mixing in (None, plan):
        inputs = logits.clone().requires_grad_()
        objective = Classification(torch.nn.Identity(), Precision("fp32", CPU), smoothing, True)
        loss, sums = objective(inputs, targets, mixing)
        loss.backward()
        results.append((loss, inputs.grad, *(sums[name] for name in SUMS)))
    for plain, mixed in zip(*results, strict=True):
        assert torch.equal(plain, mixed)


def test_sums_of_a_mixed_batch():
    """Four samples whose largest logits are known; the last one has no partner."""
    logits = torch.tensor([[5.0, 0, 0], [5.0, 0, 0], [0, 0, 5.0], [0, 5.0, 0]])
    targets = torch.tensor([0, 1, 2, 0])
    plan = MixPlan(torch.tensor([1, 0, 0, 3]), torch.tensor([0.75, 0.25, 0.5, 0.5]))

    class Fixed(torch.nn.Module):
        def forward(self, inputs):
            return logits[: len(inputs)]

    objective = Classification(
        Fixed(), Precision("fp32", CPU), counts_mixing=True, clean_accuracy=True
    )
    loss, sums = objective(torch.zeros(4, 1), targets, plan)
    assert objective.sums == SUMS + MIXED_SUMS
    assert {name: value.item() for name, value in sums.items()} == {
        "loss": pytest.approx(loss.item()),
        "correct": 0.75 + 0.75 + 0.5 + 0,
        "samples": 4,
        "larger_lambda": 0.75 + 0.75 + 0.5,
        "mixed": 3,
        "clean_correct": 1,
        "clean_samples": 1,
    }


def test_evaluating_a_part_unmixed_leaves_no_trace():
    """Statistics, random state, gradients and the mode of each module are the same without it."""
    states = []
    for clean in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 3),
        )  # fmt: skip
        model[1].eval()  # as if frozen
        objective = Classification(model, Precision("bf16", CPU), 0.1, True, clean)
        inputs, targets = torch.randn(16, 4), torch.randint(0, 3, (16,))
        plan = MixPlan(torch.randperm(16), torch.rand(16))
        loss, sums = objective(inputs, targets, plan)
        loss.backward()
        assert [module.training for module in model] == [True, False, True, True]
        unmixed = sums.pop("clean_samples"), sums.pop("clean_correct")
        states.append([loss, *sums.values(), torch.get_rng_state(), *model.state_dict().values()]
                      + [p.grad for p in model.parameters()])  # fmt: skip
        assert unmixed[0] == (2 if clean else 0)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


class MixesInside(torch.nn.Module):
    """A model of pairs of numbers, packed as texts are; records its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(4, 3), []

    def forward(self, inputs, mixing=None):
        self.calls.append((len(inputs.rows), mixing))
        hidden = self.linear(inputs.rows)
        return hidden if mixing is None else mixing.apply(hidden)


class Rows(NamedTuple):
    rows: torch.Tensor
    other: int = 0

    def first(self, k):
        return self._replace(rows=self.rows[:k])


def test_a_model_that_mixes_inside_is_handed_the_plan():
    torch.manual_seed(0)
    model, precision = MixesInside(), Precision("fp32", CPU)
    rows, targets = torch.randn(9, 4), torch.randint(0, 3, (9,))
    plan = MixPlan(torch.randperm(9), torch.rand(9))
    objective = Classification(model, precision, 0.1, True, clean_accuracy=True, mixes_inside=True)
    loss, sums = objective(Rows(rows), targets, plan)
    assert model.calls == [(9, plan), (2, None)]  # the second one is unmixed
    linear = Classification(model.linear, precision, 0.1, True, clean_accuracy=True)
    expected, expected_sums = linear(rows, targets, plan)  # the same, since the model is linear
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums, expected_sums)
    unmixed, _ = objective(Rows(rows), targets)
    torch.testing.assert_close(unmixed, linear(rows, targets)[0])
