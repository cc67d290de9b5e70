"""Local steps in one process: several workers in turn."""

import copy
import functools

import pytest
import torch
from local_runs import assert_same_checkpoint, double_network, parameters_of
from test_resume import SignalAt
from toy import history, loader, make_trainer, network

from utils.checkpoints.checkpoint import read_checkpoint
from utils.checkpoints.worker_rows import MODEL, as_one_model, row
from utils.launch.signals import StoppedBySignal
from utils.optim.schedules import Schedule

RICH = {"optimizer": "adamw", "lr": 0.01, "ema_decay": 0.9, "clip": 0.5}


def plain_schedule():
    return Schedule("cosine", 9, 2)


def saved(trainer):
    return trainer.saver.store.load()


@pytest.mark.parametrize("workers", (2, 4))
def test_averaging_in_every_step_is_plain_sgd(tmp_path, workers):
    """With momentum and weight decay. The last step of an epoch is a short one."""
    options = {"epochs": 3, "lr": 0.05, "schedule": plain_schedule}
    whole = make_trainer(
        tmp_path / "whole", model=double_network(norm=False), batch_size=8, **options
    )
    whole.fit()
    local = make_trainer(
        tmp_path / "local", model=double_network(norm=False), batch_size=8 // workers,
        local={"workers": workers}, **options,
    )  # fmt: skip
    local.fit()
    assert local.steps.rounds.averagings == local.progress.step == 9
    torch.testing.assert_close(parameters_of(local), parameters_of(whole), rtol=0, atol=1e-14)
    for ours, theirs in zip(history(tmp_path / "local"), history(tmp_path / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)


@pytest.mark.parametrize("options", ({}, RICH, {"precision": "fp16", "accumulation": 2}))
def test_one_worker_is_plain_training(tmp_path, options):
    """To the bit, with BatchNorm and dropout."""
    checkpoints = []
    for name, local in (("plain", None), ("local", {"workers": 1, "base": 3, "bn_batches": 5})):
        torch.manual_seed(5)
        trainer = make_trainer(tmp_path / name, local=local, epochs=2, **options)
        trainer.fit()
        checkpoints.append(saved(trainer))
    plain, local = checkpoints
    local = as_one_model(local)
    for part in ("model", "average", "optimizer"):
        ours, theirs = local.parts.get(part), plain.parts.get(part)
        assert (ours or {}).keys() == (theirs or {}).keys()
        for key, tensor in (theirs or {}).items():
            assert torch.equal(tensor, ours[key]), key
    assert local.state["random"] == plain.state["random"]
    further = ("averagings", "round_steps", "worker_distance", "sent_of_ddp")
    records = [
        {k: v for k, v in record.items() if k not in further}
        for record in history(tmp_path / "local")
    ]
    assert records == history(tmp_path / "plain")


class OneWorker:
    """The batches of one worker, with the loss that it has among `ranks` workers."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def epoch(self, *args):
        for batch in self.inner.epoch(*args):
            yield batch._replace(step_samples=batch.step_samples / self.inner.ranks)


def test_without_averagings_the_result_is_the_mean_of_independent_runs(tmp_path):
    options = {"epochs": 2, "eval_every": 0, "momentum": 0.9}
    ends = []
    for rank in range(3):
        data = OneWorker(loader(4, rank=rank, ranks=3))
        alone = make_trainer(tmp_path / str(rank), model=double_network(), data=data, **options)
        alone.fit()
        ends.append(parameters_of(alone))
    local = make_trainer(
        tmp_path / "local", model=double_network(), local={"workers": 3, "name": "swap"}, **options
    )
    local.fit()
    assert local.steps.rounds.averagings == 1
    for name, parameter in parameters_of(local).items():
        mean = sum(end[name] for end in ends) / 3
        torch.testing.assert_close(parameter, mean, rtol=0, atol=1e-14)
    assert local.steps.distance > 0


def test_workers_start_with_different_random_states(tmp_path):
    """So each has a dropout of its own."""
    workers = make_trainer(tmp_path, local={"workers": 4}).steps.own
    assert len({worker.random["cpu"] for worker in workers}) == 4


def stopped(folder, step, **options):
    signals = SignalAt(step)
    trainer = make_trainer(folder, signals=signals, **options)
    signals.trainer = trainer
    with pytest.raises(StoppedBySignal):
        trainer.fit()
    return trainer


DILOCO = {"name": "diloco", "outer": {"lr": 0.7, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("options", "rule"),
    (
        ({}, {}),
        (RICH, {}),
        ({"optimizer": "ngd"}, {}),
        ({"precision": "fp16", "lr": 0.01}, {}),
        (RICH, DILOCO | {"averages_state": True}),
    ),
)
def test_a_run_resumed_inside_a_round_is_bit_equal(tmp_path, options, rule):
    local = {"workers": 3, "base": 4, "bn_batches": 4} | rule
    options = options | {"local": local, "epochs": 3, "batch_size": 2}
    torch.manual_seed(5)
    whole = make_trainer(tmp_path / "whole", **options)
    whole.fit()
    torch.manual_seed(5)
    first = stopped(tmp_path / "resumed", 6, **options)  # of 12: two steps into the second round
    assert first.steps.rounds.end == 8 and not first.steps.rounds.equal
    torch.manual_seed(99)
    resumed = make_trainer(tmp_path / "resumed", model=network(dropout=0.2, seed=77), **options)
    checkpoint = saved(resumed)
    resumed.log.metrics.cut(checkpoint.state["metrics_bytes"])
    resumed.restore(checkpoint)
    resumed.fit()
    assert_same_checkpoint(saved(whole), saved(resumed))
    assert history(tmp_path / "resumed") == history(tmp_path / "whole")


def test_a_worker_that_is_not_finite_skips_its_own_step(tmp_path, capsys):
    def train(folder, bad: bool):
        trainer = make_trainer(
            tmp_path / folder, model=network(norm=False), local={"workers": 3, "base": 4},
            on_nonfinite="skip", max_steps=3, batch_size=2,
        )  # fmt: skip
        forward_backward = trainer.steps.forward_backward

        def with_nan(batch):
            if bad and trainer.progress.step == 1 and batch.worker == 1:
                batch = batch._replace(inputs=batch.inputs * float("nan"))
            forward_backward(batch)

        trainer.steps.forward_backward = with_nan
        trainer.fit()
        assert trainer.steps.rounds.averagings == 1
        return [worker.step.guard.left_out.tolist() for worker in trainer.steps.own]

    assert train("bad", True) == [[0, -1, 0], [1, 1, 0], [0, -1, 0]]
    said = capsys.readouterr().out
    assert "worker 2 of 3: 1 step with a loss or gradient that is not finite: skipped" in said
    train("good", False)
    assert "not finite" not in capsys.readouterr().out


def test_a_worker_without_optimizer_state_can_be_saved(tmp_path):
    """Its first step was left out."""

    def trainer():
        return make_trainer(
            tmp_path, model=network(norm=False), local={"workers": 3, "base": 4}, optimizer="ngd",
            on_nonfinite="skip", max_steps=3, batch_size=2, save_steps=1,
        )  # fmt: skip

    first = trainer()
    forward_backward = first.steps.forward_backward

    def with_nan(batch):
        if first.progress.step == 0 and batch.worker == 1:
            batch = batch._replace(inputs=batch.inputs * float("nan"))
        forward_backward(batch)

    first.steps.forward_backward = with_nan
    first.fit()
    early = read_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    second = trainer()
    second.steps.restore(early)
    assert second.progress.step == 1


def test_a_short_step_of_few_workers_is_no_giant_one(tmp_path, monkeypatch):
    """One of 4 workers has all its samples, as those that are mixed with each other stay together:
    it steps by twice their mean gradient, not by 4 times."""
    model, found = double_network(norm=False), []
    trainer = make_trainer(tmp_path, model=model, local={"workers": 4, "base": 9})
    steps = trainer.steps
    batch = next(trainer.loader.epoch(0))

    def update():
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()

    monkeypatch.setattr(steps.active.step, "update", update)
    for step_samples in (16, 8, 4):
        steps.forward_backward(batch._replace(step_samples=step_samples))
        steps._finish_turn()
    for mean, half, short in zip(*found, strict=True):
        torch.testing.assert_close(half, 2 * mean)
        torch.testing.assert_close(short, 2 * mean)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_worker(tmp_path):
    trainer = make_trainer(tmp_path, local={"workers": 2, "base": 9}, batch_size=2)
    forward_backward = trainer.steps.forward_backward

    def with_nan(batch):
        inputs = batch.inputs * (float("nan") if batch.worker == 1 else 1)
        forward_backward(batch._replace(inputs=inputs))

    trainer.steps.forward_backward = with_nan
    with pytest.raises(Exception, match="step 1: worker 2 of 2: the loss or its gradient"):
        trainer.fit()


def test_the_statistics_are_those_of_the_mean_over_training_batches(tmp_path):
    """Estimated over 5 micro-batches of 2 workers: 3 of the first, 2 of the second."""
    trainer = make_trainer(
        tmp_path, local={"workers": 2, "base": 100, "bn_batches": 5}, max_steps=4, dropout=0.5
    )
    trainer.fit()
    step = trainer.steps
    mean = copy.deepcopy(step.model)
    mean.load_state_dict(saved(trainer).model)
    values = []
    for rank, count in ((0, 3), (1, 2)):
        batches = loader(4, rank=rank, ranks=2).epoch(1)  # step 4 is the first of epoch 1
        for _, batch in zip(range(count), batches, strict=False):
            c = mean[0](batch.inputs).double()
            values.append((c.mean((0, 2, 3)), c.var((0, 2, 3), unbiased=True)))
    for name, of_batches in zip(("running_mean", "running_var"), zip(*values, strict=True),
                                strict=True):  # fmt: skip
        expected = sum(of_batches) / len(of_batches)
        torch.testing.assert_close(getattr(mean[1], name).double(), expected, rtol=1e-5, atol=1e-6)
    workers = [row(saved(trainer).parts["workers"], MODEL, number) for number in (0, 1)]
    assert not torch.equal(workers[0]["1.running_mean"], workers[1]["1.running_mean"])
    assert step.model[1].momentum == 0.1 and step.model.training


def test_an_evaluation_inside_a_round_leaves_the_workers(tmp_path):
    """With and without evaluations and checkpoints between: equal bits."""
    ends = []
    for every in (0, 1):
        torch.manual_seed(5)
        trainer = make_trainer(
            tmp_path / str(every), eval_every=every, save_steps=3 if every else 100, epochs=3,
            local={"workers": 2, "base": 100, "bn_batches": 3}, batch_size=2, ema_decay=0.9,
        )  # fmt: skip
        trainer.fit()
        ends.append(saved(trainer))
    for name, tensor in ends[0].parts["workers"].items():
        assert torch.equal(tensor, ends[1].parts["workers"][name]), name


def test_another_number_of_workers_starts_from_the_mean(tmp_path):
    options = {"optimizer": "adamw", "lr": 0.01, "epochs": 3, "batch_size": 2}
    first = stopped(tmp_path, 5, local={"workers": 3, "base": 100}, **options)
    checkpoint = saved(first)
    said = []
    other = make_trainer(tmp_path, local={"workers": 2, "base": 100}, **options)
    other.steps.say = said.append
    other.restore(checkpoint)
    assert said == ["step 5 is of the mean of 3 workers: 2 workers start from it"]
    for worker in other.steps.own:
        for name in other.steps.strategy.parameters:
            assert torch.equal(worker.tensors[name], checkpoint.model[name])
    states = [worker.step.optimizer.state_dict()["state"][0] for worker in other.steps.own]
    rows = checkpoint.parts["workers"]["optimizer/0.weight/exp_avg"]
    for state in states:
        torch.testing.assert_close(state["exp_avg"], rows.mean(0))
    other.fit()


@pytest.mark.parametrize("then_local", (True, False))
def test_a_run_changes_the_strategy(tmp_path, then_local):
    options = {"epochs": 3, "ema_decay": 0.9}
    locals_ = [None, {"workers": 2, "base": 2}]
    before, after = locals_ if then_local else locals_[::-1]
    first = stopped(tmp_path, 2, local=before, batch_size=8 if before is None else 4, **options)
    then = make_trainer(tmp_path, local=after, batch_size=8 if after is None else 4, **options)
    checkpoint = saved(first)
    then.restore(checkpoint)
    for name, parameter in then.steps.strategy.parameters.items():
        assert torch.equal(parameter, checkpoint.model[name])
    then.fit()
    assert then.progress.step == 9
    if then_local:
        assert then.steps.rounds.first_step == 2
        assert then.steps.summary() == "4 averagings in 7 steps: 57.1 % of DDP's bytes"


def test_the_rule_gets_the_learning_rate_of_the_first_step_of_a_round(tmp_path):
    """qsr: alpha / rate, squared, with a rate that falls linearly from 0.05 over 12 steps."""
    schedule = functools.partial(Schedule, "linear", 12)
    rule = {"name": "qsr", "alpha": 0.05, "peak_lr": 0.05, "base": 1}
    trainer = make_trainer(
        tmp_path, local={"workers": 2, "bn_batches": 0} | rule, schedule=schedule, epochs=4,
        log_every=1, batch_size=4, eval_every=0,
    )  # fmt: skip
    trainer.fit()
    expected, step = [], 0
    while step < 12:
        length = min(int((1 / (1 - step / 12)) ** 2 + 1e-9), 12 - step)
        expected += [length] * length
        step += length
    lengths = [r["round_steps"] for r in history(tmp_path) if r.get("average_over") == "steps"]
    assert lengths == expected and expected[-1] > 1


def test_statistics_without_a_batch_are_those_of_the_workers(tmp_path):
    """6 samples of 4 workers: the first one, from which they would be estimated, has none."""
    options = {"data": loader(4, n=6, ranks=4), "epochs": 2}
    local = {"workers": 4, "bn_batches": 1}
    trainer = make_trainer(tmp_path, local=local, **options)
    trainer.fit()
    mean, workers = saved(trainer).model, saved(trainer).parts["workers"]
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(mean[name], workers[MODEL + name].mean(0))
