"""What ranks agree on in a step: the mean of BatchNorm's running statistics, the loss scale."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import toy
from torch import nn

MOMENTUM = 0.1


def stepped(exchange) -> list[dict]:
    """The statistics before and after each of three steps, and those that this rank's inputs alone
    would give. The second step is not finite on the last rank."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(3, momentum=MOMENTUM), nn.Flatten(), nn.Linear(3 * 8 * 8, 3)
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = toy.make_trainer(
            Path(folder), model=model, exchange=exchange, on_nonfinite="skip", eval_every=0
        )
        trainer.prepare(0)
        trainer.steps.guard.remember()
        for step, batch in zip(range(3), trainer.loader.epoch(0), strict=False):
            if step == 1 and exchange.rank == exchange.size - 1:
                batch = batch._replace(inputs=batch.inputs * float("nan"))
            before = copy.deepcopy(model[0].state_dict())
            trainer.forward_backward(batch)
            trainer.update()
            x = batch.inputs.double()
            own = {"mean": x.mean((0, 2, 3)), "var": x.var((0, 2, 3), unbiased=True)}
            own = {
                name: (1 - MOMENTUM) * before[f"running_{name}"].double() + MOMENTUM * value
                for name, value in own.items()
            }
            found.append(
                {"own": own, "before": before, "now": copy.deepcopy(model[0].state_dict())}
            )
        assert trainer.steps.guard.left_out.tolist() == [1, 1, 0]
    return found


@pytest.fixture(scope="module")
def ranks(worlds):
    """[steps of each rank]"""
    return worlds(2).run(stepped)


def test_all_ranks_have_the_mean_of_their_statistics(ranks):
    for step in (0, 2):
        one, other = (steps[step] for steps in ranks)
        for name in ("mean", "var"):
            now = one["now"][f"running_{name}"]
            assert torch.equal(now, other["now"][f"running_{name}"])
            assert (one["own"][name] - other["own"][name]).abs().max() > 1e-3  # of other samples
            expected = (one["own"][name] + other["own"][name]) / 2
            torch.testing.assert_close(now.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_skipped_step_leaves_the_statistics(ranks):
    """It is not finite on one rank, and is skipped on both."""
    for steps in ranks:
        before, now = steps[1]["before"], steps[1]["now"]
        assert not torch.equal(before["running_mean"], torch.zeros(3))
        for name, tensor in before.items():
            assert torch.equal(now[name], tensor), name
    assert ranks[1][1]["own"]["mean"].isnan().all()


def scales_and_rows(exchange) -> list[tuple[float, dict]]:
    """The loss scale and this rank's rows of the parameters after each of three steps with FSDP.
    In the second step a gradient in the rows of the last rank is infinite."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)), []
    with tempfile.TemporaryDirectory() as folder:
        trainer = toy.make_trainer(
            Path(folder), model=model, exchange=exchange, strategy="fsdp", precision="fp16",
            eval_every=0,
        )  # fmt: skip
        train_step = trainer.steps
        strategy, collect = train_step.strategy, train_step.strategy.collect_gradients

        def collect_and_overflow() -> None:
            collect()
            if train_step.progress.step == 1 and exchange.rank == exchange.size - 1:
                strategy.parameters["1.weight"].grad[0, 0] = float("inf")

        strategy.collect_gradients = collect_and_overflow
        trainer.prepare(0)
        train_step.start()
        for _, batch in zip(range(3), trainer.loader.epoch(0), strict=False):
            trainer.forward_backward(batch)
            trainer.update()
            rows = {name: p.detach().clone() for name, p in strategy.parameters.items()}
            found.append((train_step.loss_scale, rows))
        assert train_step.guard.left_out.tolist() == [0, -1, 1]
    return found


def test_an_overflow_in_the_rows_of_one_rank_lowers_the_loss_scale_of_all(worlds):
    for steps in worlds(2).run(scales_and_rows):
        scales, (first, second, third) = zip(*steps, strict=True)
        assert scales == (2.0**16, 2.0**15, 2.0**15)
        for name, rows in first.items():
            assert torch.equal(rows, second[name]), name
        assert not torch.equal(second["1.weight"], third["1.weight"])
