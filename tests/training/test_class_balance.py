"""Losses for classes that are not equal, and steps with class weights, against plain references in
float64."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from toy import RefuseHostReads, history, loader, make_trainer, network

from utils.mixup.mixing import Mixing
from utils.training.class_balance import ClassBalance
from utils.training.objective import Classification, Precision, figures, mixed_cross_entropy

CPU = torch.device("cpu")
WEIGHTS = torch.tensor([0.25, 2.0, 0.7])
SMOOTHING = 0.1


def samples(n=12, classes=3, dtype=torch.float64):
    """(logits, targets, partners, lambda)."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, classes, generator=generator, dtype=dtype)
    targets, partners = torch.randint(0, classes, (2, n), generator=generator)
    return logits, targets, partners, torch.rand(n, generator=generator, dtype=dtype)


# ---- the loss of a sample -----------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_weighted_mean_is_that_of_pytorch(smoothing):
    logits, targets, *_ = samples()
    balance = ClassBalance(smoothing, WEIGHTS)
    mean = balance.losses(logits, targets).sum() / balance.sample_weights(targets).sum()
    plain = torch.nn.CrossEntropyLoss(WEIGHTS.double(), label_smoothing=smoothing)
    torch.testing.assert_close(mean, plain(logits, targets), rtol=1e-7, atol=0)


def test_a_mixed_sample_has_both_losses_and_both_weights():
    logits, targets, partners, lam = samples()
    balance = ClassBalance(0.3, WEIGHTS)
    own, other = balance.losses(logits, targets), balance.losses(logits, partners)
    expected = lam * own + (1 - lam) * other
    assert torch.equal(balance.losses(logits, targets, partners, lam), expected)
    expected = lam * WEIGHTS[targets] + (1 - lam) * WEIGHTS[partners]
    assert torch.equal(balance.sample_weights(targets, partners, lam), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_one_are_plain_cross_entropy_to_the_bit(dtype):
    logits, targets, partners, lam = samples(dtype=torch.float32)
    logits = logits.to(dtype)
    ones = ClassBalance(0.0, torch.ones(3))
    assert torch.equal(
        ones.losses(logits, targets), F.cross_entropy(logits.float(), targets, reduction="none")
    )
    assert torch.equal(
        ones.losses(logits, targets, partners, lam),
        mixed_cross_entropy(logits, targets, partners, lam),
    )


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss(gamma):
    logits, targets, *_ = samples()
    p = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(
        ClassBalance(focal_gamma=gamma).losses(logits, targets), -((1 - p) ** gamma) * p.log()
    )
    plain = F.cross_entropy(
        logits, targets, WEIGHTS.double(), label_smoothing=0.3, reduction="none"
    )
    torch.testing.assert_close(
        ClassBalance(0.3, WEIGHTS, gamma).losses(logits, targets), (1 - p) ** gamma * plain
    )


@pytest.mark.parametrize("gamma", [0.1, 0.5, 3.0])
def test_a_sample_that_is_right_beyond_doubt_has_no_gradient(gamma):
    """Where p rounds to 1 the power's own derivative would be infinite."""
    logits = torch.tensor([[100.0, 0.0]], requires_grad=True)
    balance = ClassBalance(focal_gamma=gamma)
    balance.losses(logits, torch.tensor([0])).sum().backward()
    assert logits.grad.abs().max() <= 1e-6


def test_gamma_and_shift_of_zero_are_plain_cross_entropy_to_the_bit():
    logits, targets, *_ = samples()
    balance = ClassBalance(0.0, None, 0.0, torch.zeros(3))
    assert torch.equal(
        balance.losses(logits, targets), F.cross_entropy(logits, targets, reduction="none")
    )


def test_logit_adjustment_is_in_the_loss_alone():
    """Equation 10 of the paper; the accuracy is that of the logits as they are."""
    logits, targets, *_ = samples()
    shift = 1.5 * torch.tensor([0.9, 0.09, 0.01]).log()
    objective = Classification(
        lambda x: x, Precision("fp32", CPU), balance=ClassBalance(logit_shift=shift)
    )
    loss, sums = objective(logits, targets)
    z = (logits + shift.double()).exp()
    expected = (z.sum(1).log() - z.log().gather(1, targets[:, None])[:, 0]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    assert sums["correct"] == (logits.argmax(1) == targets).sum()
    assert (logits.argmax(1) != (logits + shift).argmax(1)).any()


# ---- a step -------------------------------------------------------------------------------------


def trainer_of(folder: Path, model=None, **options):
    """On samples that are not augmented, with a model that draws nothing."""
    ranks = {"rank": 0, "ranks": 1, "mixing": options.get("mixing")}
    data = options.pop("data", None) or loader(
        options.get("batch_size", 4), options.pop("accumulation", 1), augment=False, **ranks
    )
    return make_trainer(
        folder, data=data, model=model or network(norm=False), momentum=0.0, eval_every=0,
        **options,
    )  # fmt: skip


def first_step(trainer, host_reads=False):
    """(the batches of the first step, the gradient that the optimizer gets, flat). Unless
    `host_reads`, the host may not wait for the device in it."""
    steps, batches, found = trainer.steps, [], []
    update = steps.optimizer.step

    def observed():
        parameters = steps.strategy.parameters.values()
        found.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
        update()

    steps.optimizer.step = observed
    trainer.prepare(0)
    steps.start()
    for batch in trainer.loader.epoch(0):
        batches.append(batch)
        with contextlib.nullcontext() if host_reads else RefuseHostReads():
            trainer.forward_backward(batch)
            if batch.ends_step:
                trainer.update()
        if batch.ends_step:
            return batches, found[0]
    raise AssertionError("no step")


def gradient_in_float64(batches, weights, smoothing=SMOOTHING):
    """(mean loss, its gradient) over the whole step."""
    model, weights = network(norm=False).double(), weights.double()
    total, count = 0.0, 0.0
    for batch in batches:
        inputs, targets, plan = batch.inputs.double(), batch.targets, batch.mix_plan

        def loss(logits, classes):
            return F.cross_entropy(
                logits, classes, weights, reduction="none", label_smoothing=smoothing
            )

        if plan is None:
            total = total + loss(model(inputs), targets).sum()
            count += weights[targets].sum()
            continue
        lam, partners = plan.lam.double(), targets[plan.partner]
        logits = model(
            lam[:, None, None, None] * inputs
            + (1 - lam)[:, None, None, None] * inputs[plan.partner]
        )
        total = total + (lam * loss(logits, targets) + (1 - lam) * loss(logits, partners)).sum()
        count += (lam * weights[targets] + (1 - lam) * weights[partners]).sum()
    mean = total / count
    gradient = torch.autograd.grad(mean, list(model.parameters()))
    return mean.item(), torch.cat([part.flatten() for part in gradient])


BALANCE = ClassBalance(SMOOTHING, WEIGHTS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation": 3},
        {"accumulation": 2, "mixing": Mixing(alpha=1.0, block=2, per_sample=True)},
        {"optimizer": "ngd"},
        {"precision": "fp16"},
    ],
    ids=["plain", "accumulation", "mixup", "ngd", "fp16"],
)
def test_a_step_takes_the_gradient_of_the_weighted_mean(tmp_path, options):
    rough = options.get("precision") == "fp16"
    trainer = trainer_of(tmp_path, balance=BALANCE, **options)
    batches, gradient = first_step(trainer, host_reads="optimizer" in options or rough)
    assert len(batches) == options.get("accumulation", 1)
    _, expected = gradient_in_float64(batches, WEIGHTS)
    error = (gradient - expected).norm() / expected.norm()
    assert error < (0.02 if rough else 1e-5)


def test_the_gradient_is_clipped_after_it_is_divided(tmp_path):
    batches, gradient = first_step(trainer_of(tmp_path, balance=BALANCE, clip=1e-3))
    _, expected = gradient_in_float64(batches, WEIGHTS)
    torch.testing.assert_close(
        gradient.double(), 1e-3 * expected / expected.norm(), rtol=1e-3, atol=1e-8
    )


def test_the_loss_that_is_logged_is_the_weighted_mean(tmp_path):
    trainer = trainer_of(tmp_path, balance=BALANCE)
    batches, _ = first_step(trainer)
    sums, _ = trainer.steps.read_sums()
    mean, _ = gradient_in_float64(batches, WEIGHTS)
    assert figures(sums)["loss"] == pytest.approx(mean, rel=1e-6)


def test_equal_weights_are_no_weights_to_the_bit(tmp_path):
    """Also where samples are mixed, accumulated and clipped."""
    runs = []
    for balance in (None, ClassBalance(0.0, torch.ones(3)), ClassBalance(0.0, 4 * torch.ones(3))):
        options = {"mixing": Mixing(alpha=1.0, block=2), "accumulation": 2, "clip": 0.5}
        trainer = trainer_of(tmp_path / str(len(runs)), max_steps=5, balance=balance, **options)
        trainer.steps.objective.label_smoothing = 0.0
        trainer.fit()
        runs.append((trainer.steps.model.state_dict(), history(tmp_path / str(len(runs)))))
    for weights, records in runs[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in runs[0][0].items())
        assert records == runs[0][1]


def test_accumulation_equals_one_large_batch(tmp_path):
    _, one = first_step(trainer_of(tmp_path / "1", balance=BALANCE, batch_size=12))
    _, many = first_step(trainer_of(tmp_path / "3", balance=BALANCE, accumulation=3))
    torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-7)


def test_a_step_of_samples_without_weight_changes_nothing(tmp_path):
    trainer = trainer_of(tmp_path, balance=ClassBalance(0.0, torch.zeros(3)))
    _, gradient = first_step(trainer)
    sums, left_out = trainer.steps.read_sums()
    assert not gradient.any() and left_out.steps == 0 and sums["weight"] == 0


def test_each_worker_of_local_steps_divides_by_its_own_weights(tmp_path):
    """With one sample each, whose weight then has no effect."""
    options = {"batch_size": 1, "local": {"workers": 2, "base": 4}, "eval_every": 0, "max_steps": 4}
    options |= {"model": None, "least": 1}
    runs = []
    for weights in (torch.ones(3), WEIGHTS):
        options["model"] = network(norm=False)
        trainer = make_trainer(
            tmp_path / str(len(runs)), balance=ClassBalance(0.0, weights), **options
        )
        trainer.fit()
        runs.append([w.tensors for w in trainer.steps.own])
    for one, other in zip(*runs, strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-7)
