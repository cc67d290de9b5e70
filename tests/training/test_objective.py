"""The objective against cross-entropy written out in float64."""

import numpy as np
import pytest
import torch

from utils.training.objective import SUMS, Classification, Precision, resolve_precision

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
    assert not sums.requires_grad and sums.dtype == torch.float64
    correct = int((logits.argmax(1) == targets).sum())
    assert dict(zip(SUMS, sums.tolist(), strict=True)) == {
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
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)


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
    assert not Precision("bf16", CPU).scaler().is_enabled()
