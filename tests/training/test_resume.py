"""A resumed run equals the uninterrupted one to the bit: weights, optimizer, order, losses."""

import dataclasses
import functools

import pytest
import torch
import toy
from toy import NoSignals, assert_same, everything, history, make_trainer, network

from utils.launch.signals import StoppedBySignal
from utils.mixup.mixing import Mixing
from utils.optim.factory import build_optimizer
from utils.optim.schedules import Plateau, Schedule
from utils.training.class_balance import ClassBalance

BALANCE = ClassBalance(0.1, torch.tensor([0.5, 2.0, 0.0]), focal_gamma=1.5)
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw", "lr": 1e-2},
    "lamb": {"optimizer": "lamb", "lr": 1e-2},
    "muon": {"optimizer": "muon", "lr": 1e-2},
    "madgrad": {"optimizer": "madgrad", "lr": 1e-3},
    "ngd": {"optimizer": "ngd"},
    "lookahead": {"lookahead_k": 3},
    "lookahead, muon, unfreeze": {"optimizer": "muon", "lookahead_k": 2, "freeze_until": 1},
    "lookahead, lamb, fp16": {"optimizer": "lamb", "lookahead_k": 2, "precision": "fp16"},
    "accumulation": {"accumulation": 2},
    "clip": {"clip": 0.1},
    "validation": {"val": True},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "max_steps": {"max_steps": 8},
    "average": {"ema_decay": 0.9},
    "average, bf16, accumulation": {"ema_decay": 0.99, "precision": "bf16", "accumulation": 2},
    "unfreeze": {"freeze_until": 1},
    "unfreeze, adamw": {"freeze_until": 1, "optimizer": "adamw", "lr": 1e-2, "ema_decay": 0.9},
    "plateau": {
        "val": True,
        "schedule": lambda: Plateau("plateau", 0, gamma=0.5, patience=0, min_factor=0.2),
        "epochs": 5,
        "losses": [2, 3, 4, 1, 3],  # the rate falls after epochs 2, 3 and 5
    },
    "mixup": {"mixing": Mixing(alpha=1.0, block=4)},
    "mixup, cutmix, accumulation": {
        "mixing": Mixing(alpha=0.4, cutmix_alpha=1.0, block=2, per_sample=True, height=8, width=8),
        "clean_accuracy": True,
        "accumulation": 2,
    },
    "auto": {"auto": True, "epochs": 5},
    "auto, unfreeze, average": {"auto": True, "epochs": 4, "freeze_until": 2, "ema_decay": 0.9},
    "policy": {
        "mixing": Mixing(alpha=0.5, block=4, meta_form="policy", clean_samples=4, update_every=2)
    },
    "policy, exact, cutmix, adamw, accumulation, average": {
        "mixing": Mixing(
            alpha=0.5,
            cutmix_alpha=1.0,
            block=2,
            meta_form="policy",
            clean_samples=4,
            update_every=3,
            per_sample=True,
            different_classes=True,
            height=8,
            width=8,
        ),
        "exact": True,
        "optimizer": "adamw",
        "accumulation": 2,
        "ema_decay": 0.9,
    },
    "policy, fp16": {
        "mixing": Mixing(alpha=0.5, block=4, meta_form="policy", clean_samples=4, update_every=2),
        "precision": "fp16",
    },
    "a lambda for each pair": {
        "mixing": Mixing(alpha=0.5, block=4, meta_form="sample", clean_samples=4),
        "ema_decay": 0.9,
    },
    "class weights, focal, accumulation": {"balance": BALANCE, "accumulation": 2},
    "class weights, sampler, policy, fp16": {
        "balance": BALANCE,
        "by_class": True,
        "mixing": Mixing(alpha=0.5, block=4, meta_form="policy", clean_samples=4, update_every=2),
        "precision": "fp16",
    },
    "early stop": {
        "val": True,
        "early_stop_patience": 2,
        "epochs": 6,
        "losses": [3, 2, 2, 2, 1, 1],
        "accuracies": [10, 30, 20, 25, 40, 40],  # the end comes after epoch 4
    },
}


class SignalAt(NoSignals):
    """SIGTERM (15) arrives during optimizer step `step`, or during the evaluation after it."""

    def __init__(self, step, trainer=None):
        self.step, self.trainer = step, trainer

    @property
    def received(self):
        return 15 if self.trainer.progress.step >= self.step else None


def make_case(folder, *, losses=None, accuracies=None, **options):
    """A trainer of toy.py whose evaluations give these figures, one for each epoch, so that what
    depends on them happens on every CPU."""
    trainer = toy.make_trainer(folder, **options)
    evaluate, steps = trainer.evaluate, trainer.loader.steps_per_epoch

    def with_figures(is_last):
        found, epoch = evaluate(is_last), trainer.progress.step // steps - 1
        if found is not None and losses:
            found = dataclasses.replace(found, loss=float(losses[epoch]))
        if found is not None and accuracies:
            found = dataclasses.replace(found, accuracy=float(accuracies[epoch]))
        return found

    trainer.evaluate = with_figures
    return trainer


def steps_of(whole, case: str, every: bool) -> list[int]:
    """The steps to resume from: the first or, in every second case, the end of an epoch, and one
    within a later epoch; with `every` all, or of more than 25 every fifth."""
    last, epoch = whole.progress.step, whole.loader.steps_per_epoch
    if every:
        return list(range(1, last, 1 if last < 25 else 5))
    return sorted({(1, epoch)[[*CASES].index(case) % 2], min(2 * epoch + 1, last - 1)})


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two steps", "every step"]
)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bit_equal(tmp_path, case, every, monkeypatch):
    options = dict(CASES[case])
    lookahead = {"lookahead_k": options.pop("lookahead_k", None)}
    monkeypatch.setattr(toy, "build_optimizer", functools.partial(build_optimizer, **lookahead))
    torch.manual_seed(5)
    whole = make_case(tmp_path / "whole", **options)
    whole.fit()
    expected, figures = everything(whole), history(tmp_path / "whole")
    last = whole.progress.step
    assert last >= 6
    if case == "early stop":
        assert whole.progress.stopped_early and last < whole.plan.total_steps
    if case == "plateau":
        assert whole.steps.schedule.reduced == 0.2
    for step in steps_of(whole, case, every):
        folder = tmp_path / f"stopped{step}"
        torch.manual_seed(5)
        signals = SignalAt(step)
        stopped = make_case(folder, signals=signals, **options)
        signals.trainer = stopped
        with pytest.raises(StoppedBySignal) as stop:
            stopped.fit()
        assert stop.value.exit_code == 143
        assert stopped.saver.store.steps()[-1] == step

        torch.manual_seed(99)  # the random state must come from the checkpoint
        resumed = make_case(folder, model=network(dropout=0.2, seed=77), **options)
        checkpoint = resumed.saver.store.load()
        resumed.log.metrics.cut(checkpoint.state["metrics_bytes"])
        resumed.restore(checkpoint)
        assert resumed.progress.step == step
        resumed.fit()
        assert_same(expected, everything(resumed))
        assert history(folder) == figures


@pytest.mark.slow
def test_resume_after_a_kill_cuts_the_metrics_back(tmp_path):
    """With checkpoints every 2 steps, a run dies later and resumes from an older one."""
    torch.manual_seed(5)
    whole = make_trainer(tmp_path / "whole", save_steps=2)
    whole.fit()
    steps = whole.saver.store.steps()
    assert len(steps) >= 5
    for step in steps[:-1]:
        later = [s for s in steps if s > step]
        torch.manual_seed(5)
        folder = tmp_path / f"killed{step}"
        killed = make_trainer(folder, save_steps=2)
        killed.fit()
        for s in later:
            (folder / "checkpoints" / f"step-{s:08}" / "model.safetensors").write_bytes(b"broken")
        resumed = make_trainer(folder, save_steps=2)
        said = []
        resumed.saver.store.warn = said.append
        checkpoint = resumed.saver.store.load()
        assert checkpoint.step == step and len(said) == len(later)
        resumed.log.metrics.cut(checkpoint.state["metrics_bytes"])
        resumed.restore(checkpoint)
        resumed.fit()
        assert_same(everything(whole), everything(resumed))
        assert history(folder) == history(tmp_path / "whole")


def test_a_resumed_run_may_be_longer(tmp_path):
    """More --epochs: the same weights, a longer schedule."""
    short = make_trainer(tmp_path, epochs=1)
    short.fit()
    longer = make_trainer(tmp_path, epochs=3)
    longer.restore(longer.saver.store.load())
    assert longer.fit().step == 3 * short.plan.total_steps


@pytest.mark.parametrize("local", [None, {"workers": 2, "base": 3}], ids=["one", "local"])
def test_the_figures_of_an_epoch_cover_all_of_it_if_a_run_ended_within_it(tmp_path, local):
    """--max_steps ended it there twice, and was then lifted."""
    for number, last in enumerate((2, 5, None)):
        trainer = make_trainer(tmp_path, epochs=2, max_steps=last, log_every=1, local=local,
                               batch_size=2)  # fmt: skip
        if number:
            trainer.restore(trainer.saver.store.load())
        trainer.fit()
    epoch, loader = trainer.loader.steps_per_epoch, trainer.loader
    assert epoch > 5
    samples = [loader.step_size] * (epoch - 1) + [loader.samples - loader.step_size * (epoch - 1)]
    records = [r for r in history(tmp_path) if r["split"] == "train"]
    losses = [r["loss"] for r in records if r["average_over"] == "steps"]
    means = {r["step"]: r["loss"] for r in records if r["average_over"] == "epoch"}
    assert len(losses) == 2 * epoch and list(means) == [2, 5, epoch, 2 * epoch]
    for first, end in ((0, 2), (0, 5), (0, epoch), (epoch, 2 * epoch)):
        weights = [samples[step % epoch] for step in range(first, end)]
        total = sum(w * loss for w, loss in zip(weights, losses[first:end], strict=True))
        assert means[end] == pytest.approx(total / sum(weights))


def test_the_loss_scaler_is_restored(tmp_path):
    """With the steps since its last growth: it goes on in the middle of its interval."""

    def part(folder, scaler=None, **options):
        trainer = make_trainer(
            tmp_path / folder, precision="fp16",
            schedule=lambda: Schedule("cosine", 18, 2), **options,
        )  # fmt: skip
        trainer.steps.scaler = scaler or trainer.steps.scaler
        assert trainer.steps.scaler.is_enabled()
        return trainer

    def quick():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    whole, first = part("whole", quick()), part("resumed", quick(), max_steps=6)
    torch.manual_seed(5)
    whole.fit()
    torch.manual_seed(5)
    first.fit()
    resumed = part("resumed")
    assert resumed.steps.scaler.get_scale() == 2.0**16
    resumed.restore(resumed.saver.store.load())
    state = resumed.steps.scaler.state_dict()
    assert state == first.steps.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (2.0**11, 2)
    resumed.fit()
    assert resumed.steps.scaler.get_scale() == 2.0**14
    assert_same(everything(whole), everything(resumed))
    assert resumed.steps.scaler.state_dict() == whole.steps.scaler.state_dict()


def test_the_memory_format_is_restored(tmp_path):
    first = make_trainer(tmp_path, epochs=1)
    first.fit()
    second = make_trainer(tmp_path, epochs=1)
    second.restore(second.saver.store.load())
    for parameter, state in second.steps.optimizer.state.items():
        if parameter.ndim == 4:
            assert state["momentum_buffer"].stride() == parameter.stride()
            assert parameter.is_contiguous(memory_format=torch.channels_last)


def test_another_optimizer_is_refused(tmp_path):
    first = make_trainer(tmp_path, epochs=1)
    first.fit()
    other = make_trainer(tmp_path, model=network(norm=False))
    with pytest.raises(Exception, match="does not fit the model"):
        other.restore(other.saver.store.load())


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_first_epoch_of_one_step_is_ended_on_resume(tmp_path, epochs):
    """The run was stopped in the evaluation after its first step, which ended an epoch."""
    options = {"epochs": epochs, "data": toy.loader(4, n=4)}
    torch.manual_seed(5)
    whole = make_trainer(tmp_path / "whole", **options)
    whole.fit()
    torch.manual_seed(5)
    signals = SignalAt(1)
    signals.trainer = make_trainer(tmp_path / "stopped", signals=signals, **options)
    with pytest.raises(StoppedBySignal):
        signals.trainer.fit()
    resumed = make_trainer(tmp_path / "stopped", **options)
    resumed.restore(resumed.saver.store.load())
    assert resumed.fit().evaluated == whole.progress.evaluated
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")
