"""Many processes train as one does on the same global batch: the same losses, the same weights."""

import tempfile
from pathlib import Path

import pytest
import torch
import toy

from utils.exchange import Exchange

GLOBAL = 8  # samples in an optimizer step
CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "accumulation": {"accumulation": 2},
    "average, clipped": {"ema_decay": 0.9, "clip": 0.1},
    "lookahead": {"optimizer_options": {"lookahead_k": 3}},
    "unfreeze": {"freeze_until": 2},
}
STRATEGIES = ("ddp", "fsdp")


def train(exchange, options: dict, strategy: str) -> dict:
    """20 steps over 23 samples, the last step of an epoch a short one."""
    torch.manual_seed(0)
    accumulation = options.get("accumulation", 1)
    options = {"max_steps": 20, "epochs": 7, "log_every": 1, "dropout": 0.0} | options
    model = toy.network(norm=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, str(exchange.rank))
        trainer = toy.make_trainer(
            path, model=model, exchange=exchange, strategy=strategy,
            batch_size=GLOBAL // exchange.size // accumulation, **options,
        )  # fmt: skip
        trainer.fit()
        records = toy.history(path)
    with trainer.evaluated_weights():
        parts, parameters = trainer.strategy.tensors(), trainer.strategy.parameters
        weights = {
            name: trainer.exchange.whole(parameters.get(name, t), t.detach()).clone()
            for name, t in parts.items()
        }
    losses = [r["loss"] for r in records if r.get("average_over") == "steps"]
    tested = [(r["loss"], r["accuracy"], r["samples"]) for r in records if r["split"] == "test"]
    return {"losses": losses, "tested": tested, "weights": weights}


def assert_equal(many: list[dict], one: dict) -> None:
    for rank in many:
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, many[0]["weights"][name])
    ours = many[0]
    assert len(ours["losses"]) == len(one["losses"]) == 20
    torch.testing.assert_close(ours["losses"], one["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours["weights"], one["weights"], rtol=0, atol=1e-5)
    for tested, expected in zip(ours["tested"], one["tested"], strict=True):
        assert tested[1:] == expected[1:] and tested[2] == 12
        assert tested[0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_does(worlds, size, strategy, case):
    options = CASES[case]
    if strategy == "fsdp" and "freeze_until" in options:
        pytest.skip("refused")
    one = train(Exchange(), options, strategy)
    assert_equal(worlds(size).run(train, options, strategy), one)
