"""Texts, as far as only a GPU can show them; skipped where there is none."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_gpu import run_epoch, run_epoch_without_waiting
from toy import make_trainer, use_engine

from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.data.texts.loader import SIZES, TextLoader
from utils.mixup.mixing import Mixing
from utils.models import transformer
from utils.models.encoder import Encoder
from utils.models.transformer import Transformer
from utils.training.evaluation import evaluate
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def data(device=CUDA, n=600, batch_size=32, **options):
    rng = np.random.default_rng(0)
    lengths, labels = rng.integers(1, 60, n), np.arange(n) % 3
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(1, 500, offsets[-1]).astype(np.uint16)
    settings = {"max_len": 48, "shuffle": True, "bucket_batches": 10} | options
    loader_class = EqualTokensLoader if "batch_tokens" in options else TextLoader
    return loader_class(tokens, offsets, labels, batch_size=batch_size, device=device, **settings)


def model(device=CUDA, **options):
    torch.manual_seed(0)
    sizes = {"layers": 3, "dim": 128, "heads": 4, "ffn": 256, "max_len": 48, "dropout": 0.0}
    return Transformer(500, 3, **(sizes | options)).to(device)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_attention_equals_padded(monkeypatch, pooling, dtype):
    """By its own kernel; both are close to the result in float32."""
    used, kernel = [], transformer.flash_attention
    monkeypatch.setattr(
        transformer, "flash_attention", lambda *given: used.append(1) or kernel(*given)
    )
    ours, batch = model(pooling=pooling), next(iter(data().epoch(0)))
    results = []
    for way in ("packed", "padded", "float32"):
        with (
            monkeypatch.context() as patch,
            torch.autocast("cuda", dtype, enabled=way != "float32"),
        ):
            if way == "padded":
                patch.setattr(transformer, "varlen_works", lambda *given: False)
            used.clear()
            logits = ours(batch.inputs).float()
            assert len(used) == (3 if way == "packed" else 0)
        F.cross_entropy(logits, batch.targets).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in ours.parameters())])
        ours.zero_grad()
    for one in results[:2]:
        for a, b in zip(one, results[2], strict=True):
            assert (a - b).norm() <= 0.05 * b.norm() + 1e-4


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_an_encoder_by_packed_attention(monkeypatch, kind):
    """As on the CPU in float32; ModernBERT's layers have a window."""
    small_encoders = pytest.importorskip("small_encoders")  # needs transformers
    used, kernel = [], transformer.flash_attention
    monkeypatch.setattr(
        transformer, "flash_attention", lambda *given: used.append(1) or kernel(*given)
    )
    sizes = {"hidden_size": 64, "max_position_embeddings": 64}
    ours = Encoder(small_encoders.model(kind, 500, **sizes), 3, max_len=48, end=499).eval()
    batches = [next(iter(data(device).epoch(0))) for device in (CPU, CUDA)]
    with torch.no_grad():
        expected = ours.features(batches[0].inputs)
        with torch.autocast("cuda", torch.bfloat16):
            found = ours.to(CUDA).features(batches[1].inputs).float().cpu()
    assert len(used) == 2
    assert (found - expected).norm() <= 0.05 * expected.norm() + 1e-3


@pytest.mark.parametrize("mixup_at", ["sentence", "embeddings"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_wait_between_log_lines(tmp_path, precision, dropout, mixup_at):
    ours = model(dropout=dropout, mixup_at=mixup_at)
    loader = data(accumulation=2, mixing=Mixing(alpha=0.5, block=8), batch_tokens=4000)
    objective = Classification(
        ours, Precision(precision, CUDA), 0.1, True, clean_accuracy=True, mixes_inside=True
    )
    trainer = make_trainer(
        tmp_path, device=CUDA, model=ours, data=loader, objective=objective, optimizer="adamw",
        precision=precision, clip=1.0,
    )  # fmt: skip
    run_epoch(trainer, 0)  # sets up memory, kernels and states
    run_epoch_without_waiting(trainer, 1)


def test_a_gpu_has_the_batches_and_logits_of_the_cpu():
    mixing = Mixing(alpha=0.5, block=8, meta_form="policy", clean_samples=8)
    there, here = (data(device, mixing=mixing).epoch(3) for device in (CUDA, CPU))
    on_gpu = model().eval()
    on_cpu = copy.deepcopy(on_gpu).cpu()
    for one, other in zip(there, here, strict=True):
        tensors = list(one.tensors())
        assert all(tensor.device == CUDA for tensor in tensors)
        for a, b in zip(tensors, other.tensors(), strict=True):
            assert torch.equal(a.cpu(), b)
        with torch.no_grad():
            logits = on_gpu(one.inputs).cpu()
            torch.testing.assert_close(logits, on_cpu(other.inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mixup_at", [None, "sentence", "embeddings"])
def test_a_run_by_graphs_is_the_ordinary_one(tmp_path, capsys, precision, mixup_at):
    """Batches are filled up to a few sizes, each of which has a graph."""
    states = []
    for graphs in (False, True):
        mixing = Mixing(alpha=0.5, block=8) if mixup_at else None
        ours, loader = model(mixup_at=mixup_at or "sentence"), data(n=32 * 40 + 5, mixing=mixing)
        objective = Classification(
            ours, Precision(precision, CUDA), 0.1, mixing is not None, mixes_inside=True
        )
        trainer = make_trainer(
            tmp_path / str(graphs), device=CUDA, model=ours, data=loader, objective=objective,
            mixing=mixing, precision=precision, clip=1.0, epochs=2,
        )  # fmt: skip
        if graphs:
            use_engine(trainer)
        for epoch in range(2):
            run_epoch(trainer, epoch)
        states.append(ours.state_dict())
    assert "not used" not in capsys.readouterr().out
    assert 1 < len(trainer.steps._graphs) <= SIZES
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=tolerance, atol=tolerance)


def test_evaluation_is_that_of_the_cpu():
    ours, loader = model(), data(shuffle=False)
    result = evaluate(ours, loader.epoch(), Precision("bf16", CUDA))
    expected = evaluate(ours.cpu(), data(CPU, shuffle=False).epoch(), Precision("fp32", CPU))
    assert result.samples == expected.samples == 600
    assert result.loss == pytest.approx(expected.loss, rel=1e-2)
