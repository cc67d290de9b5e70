"""What a strategy is asked, and when; and that another one needs no change elsewhere."""

import functools
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import make_trainer, network

from utils.distributed.strategies.base import Strategy, build_strategy
from utils.distributed.strategies.fsdp import FSDP
from utils.errors import UserError
from utils.exchange import Exchange
from utils.settings.distributed import STRATEGIES


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", [name for name, facts in STRATEGIES.items() if facts.place])
def test_no_strategy_has_more_than_the_protocol(name):
    """So no other code can depend on a particular one."""
    kind, facts = pkgutil.resolve_name(STRATEGIES[name].place), STRATEGIES[name]
    assert issubclass(kind, Strategy) and members(kind) == members(Strategy)
    assert kind.divided == facts.divides and facts.summary


def test_a_process_alone_has_the_base_class():
    for name in STRATEGIES:
        assert type(build_strategy(name, network(), Exchange())) is Strategy


def names_of_tensors(exchange, strategy: str) -> tuple[set, set]:
    """Those of the model, and those that the strategy has of it."""
    model = network()
    model.register_buffer("mask", torch.ones(3), persistent=False)
    before, spread = {*model.state_dict()}, build_strategy(strategy, model, exchange)
    return before, {*spread.tensors()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_buffers_that_the_constructor_makes_are_not_saved(worlds, name):
    """As the masks of a Swin transformer: a plain model could not load them."""
    for before, after in worlds(2).run(names_of_tensors, name):
        assert after == before


class Recording(Strategy):
    """Records which methods are called in a step, by an evaluation and by a checkpoint."""

    WATCHED = ("collect_gradients", "norm", "agree", "drop_gradients", "after_step", "make_equal")

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = []
        for name in self.WATCHED:
            setattr(self, name, self._noted(name, getattr(self, name)))

    def _noted(self, name, method):
        def call(*arguments):
            self.asked.append(name)
            return method(*arguments)

        return call


def test_the_order_of_calls_in_a_step(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1, accumulation=2, strategy=Recording, max_steps=2)
    strategy = trainer.steps.strategy
    saved, evaluated = trainer.saver.save, trainer.evaluate

    def save(*arguments):
        strategy.asked.append("SAVED")
        saved(*arguments)

    def evaluate(is_last):
        strategy.asked.append("EVALUATED")
        return evaluated(is_last)

    trainer.saver.save, trainer.evaluate = save, evaluate
    trainer.fit()
    step = ["collect_gradients", "norm", "agree", "drop_gradients", "after_step"]
    end = ["make_equal", "EVALUATED", "make_equal", "SAVED"]
    assert strategy.asked == ["drop_gradients", *step, *step, *end]


class EveryFewSteps(Strategy):
    """Ranks step independently; every few steps their weights are averaged."""

    def __init__(self, *args, every: int):
        super().__init__(*args)
        self.every, self.steps = every, 0

    def after_step(self, lr, bad):
        self.steps += 1
        if self.steps % self.every == 0:
            self._average()

    def make_equal(self):
        self._average()

    @torch.no_grad()
    def _average(self):
        for tensor in (*self.parameters.values(), *self.buffers().values()):
            if tensor.is_floating_point():
                tensor.copy_(self.exchange.mean(tensor))

    @property
    def optimizer_exchange(self):
        return Exchange()


def final_weights(exchange, folder: Path, every: int | None, steps: int, momentum: float):
    """This rank's weights after some steps, not made equal at the end; `every` None: ddp."""
    strategy = "ddp" if every is None else functools.partial(EveryFewSteps, every=every)
    trainer = make_trainer(
        folder / str(exchange.rank), exchange=exchange, strategy=strategy, max_steps=steps,
        model=network(norm=False, dropout=0.0), eval_every=0,
    )  # fmt: skip
    for group in trainer.steps.optimizer.param_groups:
        group["momentum"], group["nesterov"] = momentum, momentum > 0
    trainer.steps.strategy.make_equal = lambda: None
    trainer.fit()
    return torch.cat([p.detach().flatten() for p in trainer.steps.model.parameters()])


def test_averaged_weights_are_averaged_gradients(worlds, tmp_path):
    """Plain SGD, averaged after every step, is DDP up to rounding."""
    averaged = worlds(2).run(final_weights, tmp_path / "averaged", 1, 6, 0.0)
    reduced = worlds(2).run(final_weights, tmp_path / "ddp", None, 6, 0.0)
    torch.testing.assert_close(averaged, reduced, rtol=0, atol=1e-6)


def test_ranks_differ_between_two_averages(worlds, tmp_path):
    first, second = worlds(2).run(final_weights, tmp_path / "between", 3, 4, 0.9)
    assert not torch.equal(first, second)
    first, second = worlds(2).run(final_weights, tmp_path / "after", 3, 6, 0.9)
    assert torch.equal(first, second)


def ending_weights(exchange, folder: Path):
    """This rank's weights after a run that averaged only at its end."""
    trainer = make_trainer(
        folder / str(exchange.rank), exchange=exchange, max_steps=4, model=network(dropout=0.0),
        strategy=functools.partial(EveryFewSteps, every=10**9),
    )  # fmt: skip
    trainer.fit()
    return {name: tensor.clone() for name, tensor in trainer.steps.strategy.tensors().items()}


def test_evaluation_and_checkpoint_are_of_equal_ranks(worlds, tmp_path):
    first, second = worlds(2).run(ending_weights, tmp_path)
    for name, tensor in first.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, second[name]), name


def test_fsdp_refuses_shared_weights():
    block = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"0\.weight is also 1\.weight\): take --strategy ddp"):
        FSDP(nn.Sequential(block, block), Exchange())
