"""Several processes train as one does with the same global batch: equal losses and weights."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from utils.data.texts.loader import TextLoader
from utils.distributed.sync_batch_norm import sync_batch_norms
from utils.exchange import Exchange
from utils.mixup.mixing import Mixing
from utils.models.transformer import Transformer
from utils.models.vit import ViT
from utils.training.evaluation import evaluate

GLOBAL, STEPS = 8, 12  # samples in an optimizer step, steps
MIXED = {"alpha": 0.5, "block": 2, "height": 8, "width": 8}
LEARNED = MIXED | {"meta_form": "policy", "clean_samples": 5, "update_every": 2}
# Orthogonal steps magnify rounding where the gradients of few samples have singular values of zero;
# test_ngd_shares.py has them.
NGD = {"optimizer": "ngd", "lr": 0.01, "optimizer_options": {"ngd_orthogonal": False}}
CASES = {
    "sgd": {},
    "ngd": NGD,
    "ngd, as long as the gradient": {
        "optimizer": "ngd",
        "optimizer_options": {"ngd_norm": "gradient"},
    },
    "mixup and cutmix": {"mixing": MIXED | {"cutmix_alpha": 1.0, "per_sample": True}},
    "auto": {"auto": True},
    "meta-mixup": {"mixing": LEARNED | {"update_every": 10}, "micro": 2},
    "meta-mixup, exact": {"mixing": LEARNED, "exact": True, **NGD},
    "meta-mixup of every pair": {
        "mixing": MIXED | {"meta_form": "sample", "clean_samples": 4},
        "micro": 2,
        "exact": True,
    },
    "sync_bn": {"norm": True, "least": 1},
    "texts": {"texts": True, "optimizer": "adamw", "lr": 0.001},
    "texts, ngd": {"texts": True, **NGD, "lr": 0.004, "accumulation": 2},
    "texts, meta-mixup": {"texts": True, "mixing": LEARNED, "exact": True},
    "lamb": {"optimizer": "lamb", "lr": 0.01},
    "muon": {"optimizer": "muon", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "accumulation": {"accumulation": 2},
    "average, clipped": {"ema_decay": 0.9, "clip": 0.1},
    "lookahead": {"optimizer_options": {"lookahead_k": 3}},
    "unfreeze": {"freeze_until": 2},
    "vit": {"vit": True, "optimizer": "adamw", "lr": 0.003, "layer_decay": 0.7},
    "vit, lamb": {"vit": True, "optimizer": "lamb", "lr": 0.01, "clip": 1.0, "accumulation": 2},
}
STRATEGIES = ("ddp", "fsdp")


def texts(exchange, batch_size, accumulation=0, mixing=None) -> TextLoader:
    """23 texts of three classes, each with a word of its own; for training with `accumulation`."""
    rng = np.random.default_rng(0)
    lengths, labels = rng.integers(2, 12, 23), np.arange(23) % 3
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(5, 30, offsets[-1]).astype(np.uint16)
    tokens[offsets[:-1]], tokens[offsets[1:] - 1] = 1, 2 + labels
    return TextLoader(
        tokens, offsets, labels, batch_size=batch_size, device=toy.CPU, max_len=12,
        shuffle=accumulation > 0, accumulation=accumulation or 1, mixing=mixing,
        rank=exchange.rank, ranks=exchange.size,
    )  # fmt: skip


def train(exchange, options: dict, strategy: str) -> dict:
    """Trains for STEPS steps on 23 samples; the last step of an epoch is a short one."""
    torch.manual_seed(0)
    options = {"max_steps": STEPS, "epochs": 4, "log_every": 1, "dropout": 0.0} | options
    micro = options.pop("micro", None)  # the same for any number of ranks, by accumulation
    if micro:
        options["accumulation"] = GLOBAL // exchange.size // micro
    batch_size = GLOBAL // exchange.size // options.get("accumulation", 1)
    model = toy.network(norm=options.pop("norm", False))
    sync_batch_norms(model, exchange)
    if "mixing" in options:
        options["mixing"] = Mixing(**options["mixing"])
    if options.pop("vit", False):
        sizes = {"patch": 4, "layers": 2, "dim": 16, "heads": 2, "ffn": 32}
        model = ViT(3, 8, 8, **sizes)
        model.set_grad_checkpointing(True)
    if options.pop("texts", False):
        model = Transformer(30, 3, layers=2, dim=16, heads=2, ffn=16, max_len=12, dropout=0.0)
        options["data"] = texts(
            exchange, batch_size, options.get("accumulation", 1), options.get("mixing")
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, str(exchange.rank))
        trainer = toy.make_trainer(
            path, model=model, exchange=exchange, strategy=strategy,
            batch_size=batch_size, **options,
        )  # fmt: skip
        if "data" in options:
            trainer.evaluate = lambda is_last: evaluate(
                model, texts(exchange, 5).epoch(), trainer.steps.precision, exchange=exchange
            )
        trainer.fit()
        records = toy.history(path)
    with trainer.steps.evaluated_weights():
        parts, parameters = (
            trainer.steps.strategy.tensors(),
            trainer.steps.strategy.parameters,
        )
        weights = {
            name: trainer.steps.exchange.whole(parameters.get(name, t), t.detach()).clone()
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
    assert len(ours["losses"]) == len(one["losses"]) == STEPS
    torch.testing.assert_close(ours["losses"], one["losses"], rtol=0, atol=1e-5)
    # Normalised steps magnify rounding where a gradient is zero by symmetry: biases of keys.
    torch.testing.assert_close(ours["weights"], one["weights"], rtol=0, atol=5e-5)
    for tested, expected in zip(ours["tested"], one["tested"], strict=True):
        assert tested[1:] == expected[1:] and tested[2] in (12, 23)
        assert tested[0] == pytest.approx(expected[0], abs=1e-5)


AT_FOUR = ("sgd", "ngd", "meta-mixup, exact", "sync_bn", "texts", "texts, meta-mixup")
# Optimizers on two ranks are tested by test_optimizer_ranks.py and test_ngd_shares.py, too.
LONG = ("ngd, as long as the gradient", "lamb", "muon", "adamw", "vit, lamb")
RUNS = [pytest.param(2, case, marks=[pytest.mark.slow] if case in LONG else []) for case in CASES]
RUNS += [pytest.param(4, case, marks=pytest.mark.slow) for case in AT_FOUR]


@pytest.fixture(scope="module")
def alone():
    """(case) -> the result of one process."""
    return functools.cache(lambda case: train(Exchange(), CASES[case], "ddp"))


@pytest.mark.parametrize("size, case", RUNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_train_as_one_process_does(worlds, alone, size, strategy, case):
    if strategy == "fsdp" and "freeze_until" in CASES[case]:
        pytest.skip("it is refused")
    assert_equal(worlds(size).run(train, CASES[case], strategy), alone(case))
