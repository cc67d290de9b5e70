"""What happens at the end of a round of local steps: DiLoCo's outer step, and averaged optimizer
state; what --dry_run says of rounds."""

import pytest
import torch
from local_runs import assert_same_checkpoint, double_network, parameters_of
from toy import history, make_trainer, network

from utils.checkpoints.worker_rows import OPTIMIZER
from utils.training.local.rounds import lengths_text

OUTER = {"lr": 0.7, "momentum": 0.9}


def trained(folder, local: dict, **options):
    options = {"epochs": 3, "batch_size": 2, "eval_every": 0, "model": double_network()} | options
    trainer = make_trainer(folder, local={"workers": 3, "base": 4} | local, **options)
    trainer.fit()
    return trainer


def test_outer_steps_follow_their_formula(tmp_path):
    """Three rounds of four steps. The first one's mean is that of `constant`; the others begin
    where the outer optimizer, written here with one tensor, has put the workers."""
    trainer = make_trainer(
        tmp_path, model=double_network(), epochs=3, batch_size=2, eval_every=0,
        local={"workers": 3, "base": 4, "name": "diloco", "outer": OUTER},
    )  # fmt: skip
    steps, averaging, ends = trainer.steps, trainer.steps.averaging, []
    names = list(steps.strategy.parameters)

    def flat(tensors: dict) -> torch.Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in names]).clone()

    before, momentum = flat(steps.own[0].tensors), 0.0

    def observed():
        mean = sum(flat(worker.tensors) for worker in steps.own) / 3
        result = averaging()
        ends.append((mean, [flat(worker.tensors) for worker in steps.own]))
        return result

    steps.averaging = observed
    observed.outer, observed.state_dict = averaging.outer, averaging.state_dict
    trainer.fit()
    assert len(ends) == 3
    for mean, workers in ends:
        difference = before - mean
        momentum = 0.9 * momentum + difference
        before = before - 0.7 * (difference + 0.9 * momentum)
        for worker in workers:
            torch.testing.assert_close(worker, before, rtol=0, atol=1e-14)
            assert torch.equal(worker, workers[0])


def test_outer_rate_one_without_momentum_is_constant(tmp_path):
    plain = trained(tmp_path / "constant", {})
    outer = {"name": "diloco", "outer": {"lr": 1.0, "momentum": 0.0}}
    diloco = trained(tmp_path / "diloco", outer)
    torch.testing.assert_close(parameters_of(diloco), parameters_of(plain), rtol=0, atol=1e-13)
    other = trained(tmp_path / "other", {"name": "diloco", "outer": OUTER})
    with pytest.raises(AssertionError):
        torch.testing.assert_close(parameters_of(other), parameters_of(plain), rtol=0, atol=1e-3)


def test_one_worker_takes_outer_steps_too(tmp_path):
    options = {"workers": 1, "name": "diloco"}
    same = trained(tmp_path / "same", options | {"outer": {"lr": 1.0, "momentum": 0.0}})
    other = trained(tmp_path / "other", options | {"outer": OUTER})
    plain = make_trainer(
        tmp_path / "plain", model=double_network(), epochs=3, batch_size=2, eval_every=0
    )
    plain.fit()
    torch.testing.assert_close(parameters_of(same), parameters_of(plain), rtol=0, atol=1e-13)
    ends = [next(iter(parameters_of(trainer).values())) for trainer in (other, plain)]
    assert not torch.allclose(*ends)


def restored(folder, checkpoint, local: dict):
    trainer = make_trainer(folder, epochs=3, batch_size=2, local={"base": 4} | local)
    trainer.steps.say = lambda line: None
    trainer.restore(checkpoint)
    return trainer


def test_another_rule_and_other_workers_on_resume(tmp_path):
    """The outer optimizer starts at the mean, or goes on with what the checkpoint has."""
    outer = {"name": "diloco", "outer": OUTER}
    for local in ({"workers": 3}, {"workers": 3} | outer):
        folder = tmp_path / local.get("name", "constant")
        first = make_trainer(folder, epochs=3, max_steps=10, batch_size=2, local=local)
        first.fit()
        checkpoint = first.saver.store.load()
        for workers in (3, 2):
            then = restored(folder, checkpoint, outer | {"workers": workers})
            state = then.steps.averaging.state_dict()
            for name in then.steps.strategy.parameters:
                if "outer" not in checkpoint.parts:
                    assert torch.equal(state[f"before/{name}"], checkpoint.model[name])
                    assert not state[f"momentum/{name}"].any()
                else:
                    before = checkpoint.parts["outer"][f"before/{name}"]
                    assert torch.equal(state[f"before/{name}"], before)
        then.fit()
        without = restored(folder, checkpoint, {"workers": 3})
        assert without.steps.averaging.state_dict() is None
        without.fit()


@pytest.mark.parametrize(
    ("optimizer", "averaged", "own"),
    (
        ("sgd", {"momentum_buffer"}, set()),
        ("adamw", {"exp_avg", "exp_avg_sq"}, set()),
        ("lamb", {"exp_avg", "exp_avg_sq"}, set()),
        ("muon", {"momentum_buffer", "exp_avg", "exp_avg_sq"}, set()),
        ("madgrad", {"grad_sum_sq", "s"}, set()),
        ("ngd", {"momentum_buffer"}, {"basis_0", "spectrum_0"}),
    ),
)
def test_state_by_element_is_averaged(tmp_path, optimizer, averaged, own):
    """After the last round: what is averaged is equal, the rest of the workers' state is not."""
    trainer = trained(
        tmp_path, {"averages_state": True, "workers": 2}, optimizer=optimizer, lr=0.01,
        model=network(),
    )  # fmt: skip
    rows = trainer.saver.store.load().parts["workers"]
    kinds: dict[str, list[bool]] = {}
    for name, tensor in rows.items():
        if name.startswith(OPTIMIZER) and tensor.is_floating_point() and tensor[0].ndim:
            equal = torch.equal(tensor[0], tensor[1])
            kinds.setdefault(name.rpartition("/")[2], []).append(equal)
    assert {name for name, equal in kinds.items() if all(equal)} >= averaged, kinds
    for name in own:
        assert not all(kinds[name]), name


def test_averaged_state_is_the_mean_and_counted(tmp_path):
    apart = trained(tmp_path / "apart", {"workers": 2, "base": 100}, optimizer="adamw", lr=0.01)
    mean = trained(
        tmp_path / "mean", {"workers": 2, "base": 100, "averages_state": True}, optimizer="adamw",
        lr=0.01,
    )  # fmt: skip
    of_workers = apart.saver.store.load().parts["workers"]
    for name, rows in mean.saver.store.load().parts["workers"].items():
        if name.endswith(("exp_avg", "exp_avg_sq")):
            expected = of_workers[name].mean(0).expand_as(rows)
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-15)
    assert apart.steps.rounds.sent == 1 and mean.steps.rounds.sent == 3
    (last,) = [r for r in history(tmp_path / "mean") if r.get("average_over") == "steps"][-1:]
    assert last["sent_of_ddp"] == 3 / apart.progress.step


def test_what_a_worker_does_not_have_yet_is_not_averaged(tmp_path):
    """The second of two workers has left out its only step of the round, the first one has not."""
    trainer = make_trainer(
        tmp_path, model=network(norm=False), optimizer="ngd", lr=0.01, max_steps=2, batch_size=2,
        local={"workers": 2, "base": 1, "averages_state": True}, on_nonfinite="skip", eval_every=0,
    )  # fmt: skip
    forward_backward, sent = trainer.steps.forward_backward, []

    def with_nan(batch):
        sent.append(trainer.steps.rounds.sent)
        bad = trainer.progress.step == 0 and batch.worker == 1
        forward_backward(batch._replace(inputs=batch.inputs * (float("nan") if bad else 1)))

    trainer.steps.forward_backward = with_nan
    trainer.fit()
    assert sent[-1] == 1 < trainer.steps.rounds.sent - 1


def test_processes_average_state_in_the_same_order(tmp_path, monkeypatch):
    """Also where the parameters of one have got their state in another order."""
    trainer = make_trainer(tmp_path, max_steps=1, local={"workers": 2, "averages_state": True})
    trainer.fit()
    averaging, asked = trainer.steps.averaging, []
    monkeypatch.setattr(averaging.over_workers, "means", lambda _, names: asked.append(names) or {})
    averaging._average_state()
    state = averaging.optimizers[0].state
    backwards = dict(reversed(state.items()))
    state.clear()
    state.update(backwards)
    averaging._average_state()
    assert len(asked[0]) > 1 and asked[0] == asked[1]


def test_older_checkpoints_have_sent_as_much_as_ddp(tmp_path):
    first = make_trainer(tmp_path, max_steps=4, local={"workers": 2})
    first.fit()
    checkpoint = first.saver.store.load()
    assert checkpoint.state["local"].pop("sent") == checkpoint.state["local"]["averagings"] > 0
    for workers in (2, 3):
        rounds = restored(tmp_path, checkpoint, {"workers": workers}).steps.rounds
        assert rounds.sent == rounds.averagings == checkpoint.state["local"]["averagings"]


@pytest.mark.parametrize("moment", ("before", "half-way"))
def test_a_run_that_dies_in_an_averaging_goes_on_from_its_checkpoint(tmp_path, moment):
    """From one inside the round before, to the bits of the run that nothing has happened to."""
    options = {
        "epochs": 3, "batch_size": 2, "optimizer": "adamw", "lr": 0.01, "save_steps": 3,
        "local": {"workers": 3, "base": 4, "name": "diloco", "outer": OUTER},
    }  # fmt: skip
    whole = make_trainer(tmp_path / "whole", model=network(), **options)
    whole.fit()
    dies = make_trainer(tmp_path / "dies", model=network(), **options)
    averaging, steps = dies.steps.averaging, dies.steps

    def fails():
        if steps.rounds.averagings == 0:
            return averaging()
        assert steps.updating  # so that nothing is saved of this
        if moment == "half-way":  # the workers have their mean, the outer step is to come
            averaging.outer = None
            averaging()
        raise KeyboardInterrupt

    steps.averaging = fails
    fails.state_dict = averaging.state_dict
    with pytest.raises(KeyboardInterrupt):
        dies.fit()
    assert dies.progress.step == 8
    dies.saver.wait()
    again = make_trainer(tmp_path / "dies", model=network(seed=77), **options)
    checkpoint = again.saver.store.load()
    assert checkpoint.step == 6 and checkpoint.state["local"]["end"] == 8
    again.restore(checkpoint)
    again.fit()
    assert_same_checkpoint(whole.saver.store.load(), again.saver.store.load())


def test_a_last_round_that_the_end_of_the_run_cuts_is_told():
    assert lengths_text([4, 6, 30, 2]) == "H 4 to 30, the last round cut to 2"
    assert lengths_text([4, 4, 4, 3]) == "H 4, the last round cut to 3"
    assert lengths_text([4, 6, 30, 5]) == "H 4 to 30"
    assert lengths_text([4, 4]) == "H 4" and lengths_text([1200]) == "H 1,200"
