"""What --engine ort has of its own; tests/ort/ trains with it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from toy import facts_of, make_trainer

from utils.distributed.strategies.base import Strategy
from utils.engines.engine import choose_engine
from utils.engines.ort import session
from utils.engines.ort.export import (
    Flat,
    by_running_statistics,
    export,
    first_of,
    kind_of,
    smaller,
    tensors_of,
)
from utils.engines.ort.graph import update_statistics
from utils.engines.ort.module import FLOOR, Ort, OrtModule, relative_difference, without_dropout
from utils.errors import UserError
from utils.mixup.mixing import MixPlan
from utils.models.transformer import Transformer
from utils.packed import PackedTokens, pack
from utils.reporting.console import Console


def choose(trainer, **facts):
    facts = dataclasses.replace(facts_of(trainer), **facts)
    return choose_engine(facts, engine="ort", cuda_graphs="auto", deterministic=False)


def test_it_is_chosen_by_name_or_the_run_is_refused(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr("utils.engines.ort.module.why_missing", lambda: None)
    engine, notes = choose(trainer)
    assert isinstance(engine, Ort) and notes == []
    with pytest.raises(UserError, match=r"^--engine ort: .*add --device cpu$"):
        choose(trainer, device=torch.device("cuda"))
    monkeypatch.setattr("utils.engines.ort.module.why_missing", lambda: "it is not there")
    with pytest.raises(UserError, match=r"^--engine ort: it is not there$"):
        choose(trainer)


@pytest.mark.parametrize("there", [False, True])
def test_another_onnxruntime_is_told(monkeypatch, there):
    """Where the training core itself is installed, it is what tests/ort/ needs."""
    core = pytest.importorskip("onnxruntime").capi._pybind_state
    monkeypatch.setattr(core, "TrainingAgent", object, raising=False)
    if not there:
        monkeypatch.delattr(core, "TrainingAgent")
    reason = session.why_missing()
    assert reason is None if there else "requirements-ort.txt" in reason


def test_without_gradients_the_model_itself_is_called():
    model = nn.Linear(3, 2)
    module = Ort().wrap(Strategy(model), Console(silent=True))
    assert isinstance(module, OrtModule)
    with torch.no_grad():
        x = torch.randn(4, 3)
        assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_model_itself_is_called_with_an_empty_micro_batch(mixed):
    """As a rank gets it that has fewer texts in a step than another one."""
    model = Transformer(10, 3, 1, 4, 1, 4, max_len=5, dropout=0.0, mixup_at="sentence")
    nothing = np.zeros(0, np.int64)
    inputs = pack(nothing, nothing, nothing, torch.device("cpu"))
    plan = [MixPlan(torch.arange(0), torch.ones(0))] * mixed
    logits = OrtModule(model, pytest.fail)(inputs, *plan)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert model.head.weight.grad is not None


def test_differences_are_relative_to_each_tensor_and_to_the_whole():
    large, small = torch.tensor([3.0, 4.0]), torch.tensor([1e-9])
    assert relative_difference([large, small], [large, small]) == 0.0
    assert relative_difference([1.5 * large, small], [large, small]) == pytest.approx(0.5)
    noisy = torch.tensor([1e-3 * FLOOR])
    assert relative_difference([large, noisy], [large, small]) < 1e-3
    assert relative_difference([large * math.nan, small], [large, small]) == math.inf
    assert relative_difference([torch.ones(1)], [torch.zeros(1)]) > 1
    assert (
        relative_difference([], [])
        == relative_difference([torch.zeros(1)] * 1, [torch.zeros(1)])
        == 0.0
    )


def texts() -> PackedTokens:
    """Two texts: 5 6 7, and 8."""
    ids, place = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 2, 3])
    borders = torch.tensor([0, 3, 4])
    return PackedTokens(ids, place, borders.int(), 3, borders.numpy())


def test_packed_texts_become_rows_with_padding():
    model = Transformer(10, 3, 1, 4, 1, 4, max_len=5, dropout=0.0, pad=9).eval()
    tensors = tensors_of(model, texts())
    assert torch.equal(tensors["inputs"], torch.tensor([[5, 6, 7], [8, 9, 9]]))
    torch.testing.assert_close(Flat(model)(*tensors.values()), model(texts()))
    plan = MixPlan(torch.tensor([1, 0]), torch.tensor([0.25, 1.0]))
    tensors = tensors_of(model, texts(), plan)
    torch.testing.assert_close(Flat(model)(*tensors.values()), model(texts(), plan))
    first = first_of(tensors, 1)
    assert first["partner"].tolist() == [0] and first["lam"].tolist() == [0.25]
    assert kind_of(first) == kind_of(tensors) != kind_of(tensors_of(model, texts()))


def test_a_batch_that_is_smaller_in_every_dimension():
    """Two samples and a token stay."""
    of_texts = {"inputs": torch.arange(20).view(5, 4), "lam": torch.arange(5) / 4}
    few = smaller(of_texts | {"partner": torch.tensor([4, 3, 2, 1, 0])}, 3)
    assert few["inputs"].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert few["partner"].tolist() == [1, 2, 0] and few["lam"].tolist() == [0.0, 0.25, 0.5]
    assert smaller(of_texts, 8)["inputs"].shape == (4, 3)
    assert smaller({"inputs": torch.arange(2).view(2, 1)}, 8)["inputs"].shape == (2, 1)
    assert smaller({"inputs": torch.zeros(3, 1, 4, 4)}, 8)["inputs"].shape == (2, 1, 4, 4)
    assert smaller({"inputs": torch.zeros(1, 1, 4, 4)}, 8)["inputs"].shape == (1, 1, 4, 4)


def test_statistics_are_those_of_pytorch():
    plain, mended = (
        nn.BatchNorm2d(2, momentum=0.3).double(),
        nn.BatchNorm2d(2, momentum=0.3).double(),
    )
    for seed in range(2):
        x = torch.randn(3, 2, 2, 1, generator=torch.Generator().manual_seed(seed)).double()
        plain(x)
        mean = 0.7 * mended.running_mean + 0.3 * x.mean((0, 2, 3))
        var = 0.7 * mended.running_var + 0.3 * x.var((0, 2, 3), correction=0)
        update_statistics(mended, mean, var, torch.tensor(x.numel()))
    for found, expected in zip(mended.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (3, 2)), (nn.BatchNorm2d, (3, 2, 4, 5))]
)
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_that_is_not_trained(kind, shape, affine):
    norm = kind(2, affine=affine).double().eval()
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2)
    x = torch.randn(shape).double()
    found = by_running_statistics(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
    )
    torch.testing.assert_close(found, norm(x))


class Small(nn.Module):
    """Has all that a graph is mended for."""

    def __init__(self, rate: float):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.dropout, self.norm = nn.Dropout(rate), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.dropout(self.bn(self.conv(x)).flatten(1)))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_graph_of_a_model(rate):
    pytest.importorskip("onnx")
    model = Small(rate).train()
    exported = export(model, {"inputs": torch.randn(3, 1, 2, 2)})
    nodes = {node.op_type: node for node in exported.proto.graph.node}
    assert len(nodes["LayerNormalization"].output) == 3
    assert exported.draws is ("Dropout" in nodes) is (rate > 0)
    outputs = [*nodes["BatchNormalization"].output[1:], *nodes["Size"].output]
    assert exported.norms == {"bn": outputs}
    batch = exported.proto.graph.input[0].type.tensor_type.shape.dim[0]
    assert batch.dim_param == "batch"
    steady = without_dropout(model)
    assert not export(steady, {"inputs": torch.randn(3, 1, 2, 2)}).draws and model.bn.training
