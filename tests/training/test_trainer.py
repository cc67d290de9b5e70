"""The training loop against plain ones, and with numbers that are not finite."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy import CPU, RefuseHostReads, everything, history, loader, make_trainer, network, steps_of

from utils.errors import UserError
from utils.models.vit import ViT
from utils.training.objective import Classification, Precision
from utils.training.progress import LeftOut, Progress


def plain_loop(model, data, *, epochs, lr, weight_decay, total, warmup, smoothing):
    """SGD with Nesterov momentum, cosine and warm-up, written out."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    momentum = {p: torch.zeros_like(p) for p in model.parameters()}
    losses, step = [], 0
    for epoch in range(epochs):
        for batch in data.epoch(epoch):
            if step < warmup:
                rate = lr * (step + 1) / warmup
            else:
                rate = lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
            loss = F.cross_entropy(model(batch.inputs), batch.targets, label_smoothing=smoothing)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    g = p.grad + (weight_decay * p if any(p is q for q in decayed) else 0)
                    momentum[p] = 0.9 * momentum[p] + g
                    p -= rate * (g + 0.9 * momentum[p])
            losses.append(loss.item())
            step += 1
    return losses


def test_it_equals_a_plain_loop(tmp_path):
    trainer = make_trainer(tmp_path, dropout=0.0, log_every=1)
    model = network(dropout=0.0)
    trainer.fit()
    losses = plain_loop(
        model, loader(4), epochs=3, lr=0.05, weight_decay=1e-3, total=trainer.plan.total_steps,
        warmup=2, smoothing=0.1,
    )  # fmt: skip
    logged = [r["loss"] for r in history(tmp_path) if r.get("average_over") == "steps"]
    np.testing.assert_allclose(logged, losses, rtol=1e-4)
    for (name, ours), theirs in zip(
        trainer.steps.model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


class DoubleLoader:
    """A loader with its batches in float64."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def epoch(self, *position):
        for batch in self.inner.epoch(*position):
            yield batch._replace(inputs=batch.inputs.double())


@pytest.mark.parametrize(
    "n", [23, 24, 17, 19]
)  # last windows: short, whole, one sample, two batches
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_accumulation_equals_one_large_batch(tmp_path, n, optimizer):
    def train(batch_size, accumulation):
        model = network(norm=False, dropout=0.0).double()
        data = DoubleLoader(loader(batch_size, accumulation, n=n))
        trainer = make_trainer(
            tmp_path / f"{batch_size}", model=model, data=data, optimizer=optimizer, clip=1.0,
            eval_every=0,
        )  # fmt: skip
        trainer.fit()
        return trainer

    small, large = train(2, 4), train(8, 1)
    assert small.plan.total_steps == large.plan.total_steps
    for (name, one), other in zip(
        small.steps.model.named_parameters(), large.steps.model.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=name)
    # What is logged is of all micro-batches, too.
    for ours, theirs in zip(history(tmp_path / "2"), history(tmp_path / "8"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["accuracy"] == theirs["accuracy"]


@pytest.mark.parametrize("clip", [1000.0, 2000.0])
def test_a_clipped_step_of_sgd_moves_the_weights_by_the_rate_times_clip(tmp_path, clip):
    trainer = make_trainer(tmp_path, clip=clip, lr=0.01, momentum=0.0)
    # A gradient so large that weight decay does not matter beside it.
    objective = trainer.steps.objective

    def larger(*batch):
        loss, sums = objective(*batch)
        return 1e6 * loss, sums

    trainer.steps.objective = larger
    weights = list(trainer.steps.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    next(steps_of(trainer, epoch=0))
    moved = torch.stack([(w - b).norm() for w, b in zip(weights, before, strict=True)]).norm()
    assert moved.item() == pytest.approx(trainer.steps.learning_rate * clip, rel=1e-4)


def test_a_vit_accumulates_8_micro_batches_of_32_as_one_of_256(tmp_path):
    def train(batch_size, accumulation):
        torch.manual_seed(0)
        model = ViT(3, 8, 8, patch=4, layers=2, dim=16, heads=2, ffn=32).double()
        data = DoubleLoader(loader(batch_size, accumulation, n=300))  # steps of 256 and of 44
        trainer = make_trainer(
            tmp_path / f"{batch_size}", model=model, data=data, optimizer="lamb", clip=1.0,
            epochs=2, eval_every=0,
        )  # fmt: skip
        assert trainer.fit().step == 4
        return list(model.parameters())

    torch.testing.assert_close(train(32, 8), train(256, 1), rtol=0, atol=1e-10)


def test_a_loss_scale_changes_nothing_of_accumulated_and_clipped_steps(tmp_path):
    def train(scale):
        model = network(norm=False, dropout=0.0).double()
        data = DoubleLoader(loader(2, 4))
        trainer = make_trainer(
            tmp_path / f"{scale}", model=model, data=data, clip=0.1, eval_every=0
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", scale, growth_interval=3, enabled=scale > 0)
        trainer.steps.scaler = scaler
        trainer.fit()
        assert not scale or scaler.get_scale() == 8 * scale  # after 9 steps
        return list(model.parameters())

    torch.testing.assert_close(train(2.0**10), train(0), rtol=1e-12, atol=1e-14)


def test_an_overflow_in_one_micro_batch_leaves_out_its_step_alone(tmp_path):
    model, weights, scales = network(), [], []
    trainer = make_trainer(
        tmp_path, model=model, data=loader(2, 4, n=24), clip=0.1, precision="fp16",
        objective=Poisoned(model, {5}, "gradient"),
    )  # fmt: skip
    trainer.steps.start()
    for batch in trainer.loader.epoch(0):
        trainer.forward_backward(batch)
        if batch.ends_step:
            trainer.update()
            weights.append(model[0].weight.detach().clone())
            scales.append(trainer.steps.scaler.get_scale())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert scales == [2.0**16, 2.0**15, 2.0**15]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ten_steps_without_a_host_read(tmp_path, optimizer, precision):
    trainer = make_trainer(
        tmp_path, data=loader(4, 2, n=96), optimizer=optimizer, precision=precision, clip=1.0
    )
    trainer.steps.model.train()
    with RefuseHostReads():
        trainer.steps.guard.remember()
        for batch in trainer.loader.epoch(0):
            trainer.forward_backward(batch)
            if batch.ends_step:
                trainer.update()
                trainer.steps.guard.remember()
            if trainer.progress.step == 10:
                break
    assert trainer.progress.step == 10


class Poisoned(Classification):
    """An objective with NaN in the loss, or in the gradient alone, at the given calls."""

    def __init__(self, model, calls, where="loss"):
        super().__init__(model, Precision("fp32", CPU), 0.0)
        self.calls, self.where, self.count = calls, where, 0

    def __call__(self, inputs, targets, mixing=None):
        loss, sums = super().__call__(inputs, targets)
        if self.count in self.calls:
            if self.where == "loss":
                loss, sums = loss * float("nan"), sums | {"loss": sums["loss"] * float("nan")}
            else:
                loss.register_hook(lambda gradient: gradient * float("inf"))
        self.count += 1
        return loss, sums


def test_sums_are_read_from_checkpoints_of_other_versions(tmp_path):
    """Those without names are in a known order; one that is missing begins at zero."""
    assert Progress(window_sums=[2.0, 1.0, 4.0]).window_sums == {
        "loss": 2.0, "correct": 1.0, "samples": 4.0,
    }  # fmt: skip
    trainer = make_trainer(tmp_path)
    checkpoint = trainer.steps.snapshot()
    sums = {"samples": 4.0, "loss": 2.0, "of a newer version": 1.0}
    checkpoint.state["progress"] |= {"window_sums": sums}
    trainer.steps.restore(checkpoint)
    assert trainer.steps.read_sums()[0] == {"loss": 2.0, "correct": 0.0, "samples": 4.0}


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("bad_step", [0, 3])
def test_a_step_that_is_not_finite_leaves_no_trace(tmp_path, where, optimizer, bad_step):
    model = network(dropout=0.0)
    objective = Poisoned(model, {bad_step}, where)
    trainer = make_trainer(
        tmp_path, model=model, objective=objective, optimizer=optimizer, on_nonfinite="skip"
    )
    model.train()
    batches = list(trainer.loader.epoch(0))
    for step, batch in enumerate(batches[:5]):
        before = everything(trainer)
        trainer.steps.guard.remember()
        trainer.forward_backward(batch)
        trainer.update()
        after = everything(trainer)
        for key in before:
            if key.startswith("model/") or (key.startswith("optimizer/") and step):
                unchanged = torch.equal(before[key], after[key])
                assert unchanged == (step == bad_step), key
    assert trainer.steps.guard.left_out.tolist() == [1, bad_step, 0]
    assert trainer.steps.window[2].item() == 4 * 4


def test_a_step_that_is_not_finite_stops_the_run_with_advice(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Poisoned(model, {4}), save_steps=2)
    with pytest.raises(
        UserError, match=r"step 5: .*0.05; take a lower --lr.*--on_nonfinite skip.*of step 4"
    ):
        trainer.fit()
    checkpoint = trainer.saver.store.load()
    assert checkpoint.step == 4
    assert all(torch.isfinite(t.float()).all() for t in checkpoint.model.values())


def test_skipped_steps_are_counted(tmp_path):
    model = network()
    objective = Poisoned(model, {2, 7})
    trainer = make_trainer(tmp_path, model=model, objective=objective, on_nonfinite="skip")
    progress = trainer.fit()
    assert progress.left_out.steps == 2 and progress.step == trainer.plan.total_steps
    assert history(tmp_path)[-3]["skipped_steps"] == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("log_every, save_steps", [(1, 10**9), (5, 10**9), (1, 1), (20, 10**9)])
def test_one_bad_step_is_skipped_at_any_log_interval(tmp_path, log_every, save_steps):
    model = network()
    objective = Poisoned(model, {5, 8, 9})
    trainer = make_trainer(
        tmp_path, model=model, objective=objective, on_nonfinite="skip", log_every=log_every,
        save_steps=save_steps,
    )  # fmt: skip
    assert trainer.fit().left_out.steps == 3


def test_a_run_with_nothing_but_skipped_steps_stops(tmp_path):
    model = network()
    objective = Poisoned(model, set(range(1000)))
    trainer = make_trainer(
        tmp_path, model=model, objective=objective, on_nonfinite="skip", epochs=50
    )
    with pytest.raises(UserError, match=r"^at step 100: the last 100 steps .*not finite") as stop:
        trainer.fit()
    assert "--on_nonfinite" not in str(stop.value)


def test_a_later_step_is_not_given_the_number_of_the_first_one(tmp_path):
    """A run that has skipped a step is resumed without --on_nonfinite skip."""
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Poisoned(model, {9}))
    trainer.progress.left_out = LeftOut(1, 2)
    trainer.steps.guard.left_out.copy_(torch.tensor(trainer.progress.left_out))
    with pytest.raises(UserError, match=r"^at step 10: "):
        trainer.fit()


def test_an_fp16_scale_that_collapses_stops_the_run(tmp_path):
    model = network()
    objective = Poisoned(model, set(range(10**6)), "gradient")
    trainer = make_trainer(tmp_path, model=model, objective=objective, precision="fp16", epochs=30)
    with pytest.raises(UserError, match="--precision bf16"):
        trainer.fit()


def test_the_best_checkpoint_is_kept(tmp_path):
    trainer = make_trainer(tmp_path, val=True, epochs=6, save_steps=1, lr=1e-6)
    trainer.saver.store.keep = 2
    progress = trainer.fit()
    assert progress.best_step is not None and progress.best_val_accuracy is not None
    newest = [trainer.plan.total_steps - 1, trainer.plan.total_steps]
    assert trainer.saver.store.steps() == sorted({progress.best_step, *newest})


def test_figures_do_not_depend_on_the_log_interval(tmp_path):
    for log_every in (1, 3, 1000):
        torch.manual_seed(5)
        make_trainer(tmp_path / str(log_every), log_every=log_every).fit()
    ends = [
        [r for r in history(tmp_path / str(k)) if r.get("average_over") != "steps"]
        for k in (1, 3, 1000)
    ]
    for other in ends[1:]:
        for one, two in zip(ends[0], other, strict=True):
            assert one.keys() == two.keys()
            numbers = {k: v for k, v in one.items() if not isinstance(v, str)}
            assert numbers == pytest.approx({k: two[k] for k in numbers}, rel=1e-12)


def test_it_says_what_it_does(tmp_path):
    """From when on: so a batch is loaded under "loading", and exchanged under "computing"."""
    trainer, said = make_trainer(tmp_path, accumulation=2, max_steps=2, save_steps=1), []
    trainer.enter = lambda phase: said.append((phase, trainer.progress.step))
    trainer.fit()
    micro_batch = ["loading", "computing"]
    assert said == [
        *[(phase, 0) for phase in micro_batch * 2],
        ("saving", 1),
        *[(phase, 1) for phase in micro_batch * 2],
        ("evaluating", 2),
        ("saving", 2),
        ("finishing", 2),
    ]


def test_the_first_step_alone_has_no_speed(tmp_path):
    """The speed excludes it, as memory is set up and code compiled in it."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit()
    assert trainer.progress.seconds_training > 0 and trainer.samples_per_second is None
