"""Meta-mixup in the trainer: its rates, updates and reports, and what it can be combined with."""

import itertools
import math

import pytest
import torch
from toy import CPU, everything, history, make_trainer, network

from utils.mixup.mixing import Mixing
from utils.optim.schedules import Schedule
from utils.runs.dry_run import time_steps
from utils.training.objective import Classification, Precision


def mixing(form="policy", block=4, clean=4, every=2, **options):
    return Mixing(
        alpha=0.5, block=block, meta_form=form, clean_samples=clean, update_every=every, **options
    )


def learned(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.steps.meta.state_dict().items()}


def test_lambda_is_the_policys(tmp_path):
    """The plan of every micro-batch has the policy's lambda at the quantile drawn for it."""
    trainer = make_trainer(tmp_path, mixing=mixing(per_sample=True))
    trainer.fit()
    for batch in trainer.loader.epoch(1):
        lam = trainer.steps.meta.choose(batch, 0.1).lam
        partners = batch.targets[batch.mix_plan.partner]
        expected = trainer.steps.meta.policy(batch.targets, partners, batch.mix_plan.lam)
        assert torch.equal(lam, expected) and (lam >= 0.5).all()
    lines = [r for r in history(tmp_path) if r["split"] == "train"]
    assert all(0.5 <= line["lambda"] <= 1 for line in lines)


def watched_rates(trainer) -> list[tuple[int, str, float]]:
    """Records (step, method that was given the rate, learning rate) while the trainer runs."""
    found, meta, optimizer = [], trainer.steps.meta, trainer.steps.optimizer
    choose, update, step = meta.choose, meta.update, optimizer.step

    def note(who, rate):
        found.append((trainer.progress.step, who, rate))

    def chooses(batch, lr):
        note("choose", lr)
        return choose(batch, lr)

    def updates(bad, lr):
        note("update", lr)
        update(bad, lr)

    def steps():
        note("step", optimizer.param_groups[0]["lr"])
        step()

    meta.choose, meta.update, optimizer.step = chooses, updates, steps
    return found


@pytest.mark.parametrize("form", ["policy", "sample"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lambda_is_chosen_at_the_rate_of_its_own_step(tmp_path, form, accumulation):
    """Also in the first step of a resumed run."""
    options = {
        "mixing": mixing(form, every=1), "accumulation": accumulation, "epochs": 2, "log_every": 1,
        "schedule": lambda: Schedule("cosine", 6, 2),
    }  # fmt: skip
    stopped = make_trainer(tmp_path, max_steps=3, **options)
    first = watched_rates(stopped)
    stopped.fit()
    resumed = make_trainer(tmp_path, max_steps=6, **options)
    resumed.restore(resumed.saver.store.load())
    rest = watched_rates(resumed)
    resumed.fit()
    rates = [0.05 * Schedule("cosine", 6, 2).factor(step) for step in range(6)]
    assert rates[:2] == [0.025, 0.05]
    assert [step for step, who, _ in first + rest if who == "step"] == [*range(6)]
    assert sum(who == "choose" for _, who, _ in first + rest) > 5 * accumulation
    for step, who, rate in first + rest:
        assert rate == rates[step], (step, who)
    logged = [r["lr"] for r in history(tmp_path) if r.get("average_over") == "steps"]
    assert logged == rates


def test_a_dry_run_chooses_at_the_rate_of_its_own_step(tmp_path):
    trainer = make_trainer(tmp_path, mixing=mixing("sample"))
    told = watched_rates(trainer)
    time_steps(trainer)
    assert len(told) > 20
    for step, who, rate in told:
        assert rate == 0.05 * trainer.steps.schedule.factor(step), (step, who)


@pytest.mark.parametrize("off_epoch", [None, 1])
def test_the_policy_is_updated_at_its_interval(tmp_path, off_epoch):
    trainer = make_trainer(tmp_path, mixing=mixing(every=4, off_epoch=off_epoch), epochs=2)
    trainer.fit()  # 12 steps, and 6 of them before `off_epoch`
    updates = trainer.steps.meta.policy.optimizer.state[trainer.steps.meta.policy.shared][
        "step"
    ].item()
    assert updates == (2 if off_epoch else 3)  # at the steps 0, 4 and 8


class Poisoned(Classification):
    """The loss is NaN in one call."""

    def __init__(self, model, call):
        super().__init__(model, Precision("fp32", CPU), counts_mixing=True)
        self.call, self.count = call, 0

    def __call__(self, inputs, targets, mixing=None):
        loss, sums = super().__call__(inputs, targets, mixing)
        self.count += 1
        return (loss * math.nan, sums) if self.count == self.call else (loss, sums)


def test_a_skipped_step_leaves_the_policy(tmp_path):
    model = network(dropout=0.0)
    trainer = make_trainer(
        tmp_path, model=model, objective=Poisoned(model, 3), mixing=mixing(every=1),
        on_nonfinite="skip",
    )  # fmt: skip
    model.train()
    states = [learned(trainer)]
    for batch in trainer.loader.epoch(0):
        trainer.forward_backward(batch)
        trainer.update()
        states.append(learned(trainer))
    same = [one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
            for one, other in itertools.pairwise(states)]  # fmt: skip
    assert same == [False, False, True, False, False, False]
    assert all(torch.isfinite(tensor).all() for tensor in states[-1].values())


@pytest.mark.parametrize("n", [21, 23])
def test_accumulation_equals_one_batch(tmp_path, n):
    """The policy is updated by the same pairs however the step is divided."""
    results = []
    for size, accumulation in ((8, 1), (4, 2)):
        drawn = mixing(block=4, clean=4, every=1, per_sample=True)
        trainer = make_trainer(
            tmp_path / f"{size}", model=network(norm=False), batch_size=size,
            accumulation=accumulation, mixing=drawn,
        )  # fmt: skip
        trainer.fit()
        results.append(everything(trainer))
    for name, value in results[0].items():
        if name.startswith(("model/", "mixup/")):
            torch.testing.assert_close(value, results[1][name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("form", ["policy", "sample"])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "ngd"},
        {"optimizer": "adamw", "ema_decay": 0.9, "clip": 1.0, "exact": True},
        {"precision": "bf16", "accumulation": 2},
        {"precision": "fp16"},
        {"freeze_until": 1},
    ],
    ids=str,
)
def test_it_trains_together_with(tmp_path, form, options):
    drawn = mixing(form, cutmix_alpha=1.0, different_classes=True, height=8, width=8)
    trainer = make_trainer(tmp_path, mixing=drawn, **options)
    progress = trainer.fit()
    assert progress.step == trainer.plan.total_steps and progress.left_out.steps == 0
    state = everything(trainer)
    assert all(torch.isfinite(value).all() for key, value in state.items() if key != "random")
    if form == "policy":
        policy = trainer.steps.meta.policy
        assert policy.shared.item() != policy.start
