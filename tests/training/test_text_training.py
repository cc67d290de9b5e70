"""Training on texts: any accumulation, resume, evaluation."""

import numpy as np
import pytest
import torch
from toy import CPU, RefuseHostReads, assert_same, everything, make_trainer

from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.data.texts.loader import TextLoader
from utils.mixup.mixing import Mixing
from utils.models.transformer import Transformer
from utils.training.evaluation import evaluate
from utils.training.objective import Classification, Precision

FP32 = Precision("fp32", CPU)


def data(n=38, batch_size=4, accumulation=1, shuffle=True, batch_tokens=None, **options):
    """Texts of three classes, each with its own word."""
    rng = np.random.default_rng(0)
    lengths, labels = rng.integers(2, 12, n), np.arange(n) % 3
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(5, 30, offsets[-1]).astype(np.uint16)
    tokens[offsets[:-1]], tokens[offsets[1:] - 1] = 1, 2 + labels
    loader_class = TextLoader
    if batch_tokens is not None:
        loader_class, options["batch_tokens"] = EqualTokensLoader, batch_tokens
    return loader_class(
        tokens, offsets, labels, batch_size=batch_size, device=CPU, accumulation=accumulation,
        max_len=12, shuffle=shuffle, bucket_batches=10, **options,
    )  # fmt: skip


def trainer(
    folder,
    mixup_at="sentence",
    dropout=0.0,
    clean_accuracy=False,
    epochs=2,
    optimizer="adamw",
    lr=0.05,
    **options,
):
    torch.manual_seed(0)
    model = Transformer(
        30, 3, layers=2, dim=16, heads=2, ffn=16, max_len=12, dropout=dropout, mixup_at=mixup_at
    )
    loader = data(**options)
    mixing = loader.mixing is not None
    objective = Classification(model, FP32, 0.1, mixing, clean_accuracy, mixes_inside=True)
    made = make_trainer(
        folder, model=model, data=loader, objective=objective, optimizer=optimizer, lr=lr,
        epochs=epochs,
    )  # fmt: skip
    made.evaluate = lambda is_last: evaluate(model, data(shuffle=False).epoch(), FP32)
    return made


@pytest.mark.parametrize("batch_tokens", [None, 30])
def test_resumed_is_uninterrupted(tmp_path, batch_tokens):
    options = {"dropout": 0.2, "batch_tokens": batch_tokens, "clean_accuracy": True}
    options |= {"mixing": Mixing(alpha=0.5, block=2, per_sample=True), "accumulation": 2}
    whole = trainer(tmp_path / "whole", **options)
    whole.fit()
    part = trainer(tmp_path / "part", **options)
    part.prepare(0)
    part.steps.guard.remember()
    for batch in part.loader.epoch(0):
        part.forward_backward(batch)
        if batch.ends_step:
            part.update()
        if part.progress.step == 3:
            break
    part.save(final=True)
    rest = trainer(tmp_path / "part", **options)
    rest.restore(rest.saver.store.load())
    rest.fit()
    assert_same(everything(rest), everything(whole))


@pytest.mark.parametrize("mixup_at", ["sentence", "embeddings"])
def test_any_division_of_a_step_trains_the_same(tmp_path, mixup_at):
    weights = []
    for batch_size, accumulation in ((8, 1), (4, 2), (2, 4)):
        mixing = Mixing(alpha=0.5, block=2, per_sample=True)
        made = trainer(
            tmp_path / f"{batch_size}", mixup_at, batch_size=batch_size,
            accumulation=accumulation, mixing=mixing, optimizer="sgd",
        )  # fmt: skip
        made.fit()
        weights.append([p.detach() for p in made.steps.model.parameters()])
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_learns_and_counts_each_text_once(tmp_path):
    made = trainer(tmp_path, epochs=12, n=240, lr=0.01)
    made.fit()
    model = made.steps.model
    small, large = (
        evaluate(model, data(240, size, shuffle=False).epoch(), FP32) for size in (7, 99)
    )
    assert small.samples == large.samples == 240
    assert small.accuracy == large.accuracy > 90
    assert small.loss == pytest.approx(large.loss, rel=1e-5)


@pytest.mark.parametrize("mixup_at", ["sentence", "embeddings"])
@pytest.mark.parametrize("batch_tokens", [None, 30])
def test_steps_without_a_host_read(tmp_path, mixup_at, batch_tokens):
    made = trainer(
        tmp_path, mixup_at, dropout=0.1, clean_accuracy=True, n=96, accumulation=2,
        batch_tokens=batch_tokens, mixing=Mixing(alpha=0.5, block=2, per_sample=True),
    )  # fmt: skip
    made.prepare(0)
    with RefuseHostReads():
        made.steps.guard.remember()
        for batch in made.loader.epoch(0):
            made.forward_backward(batch)
            if batch.ends_step:
                made.update()
                made.steps.guard.remember()
    assert made.progress.step >= 10
