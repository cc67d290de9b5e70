"""When cuDNN benchmarks plans, and which attention is used; checks the settings without a GPU."""

import functools

import numpy as np
import pytest
import torch
from toy import Classification, Precision, loader, make_trainer, network

from utils.data import batch as data_batch
from utils.machine.backends import prefer_flash_attention, trial_plans
from utils.models import transformer
from utils.models.transformer import Transformer
from utils.packed import pack
from utils.training.memory import succeeds

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restore_settings():
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = cudnn.benchmark, cudnn.deterministic, cuda.cudnn_sdp_enabled()
    yield
    cudnn.benchmark, cudnn.deterministic = before[:2]
    cuda.enable_cudnn_sdp(before[2])


class Recording(Classification):
    """Records the samples of each forward pass, and whether plans are benchmarked for it."""

    def __init__(self, model):
        super().__init__(model, Precision("fp32", CPU))
        self.seen = []
        model.register_forward_hook(self._record)

    def _record(self, model, inputs, output):
        self.seen.append((len(inputs[0]), model.training, torch.backends.cudnn.benchmark))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_plans_are_searched_only_for_full_micro_batches(tmp_path, accumulation):
    """23 images in fours: the last micro-batch has 3. Evaluation uses batches of 4, too."""
    model = network()
    objective = Recording(model)
    trainer = make_trainer(
        tmp_path, model=model, objective=objective, epochs=2, accumulation=accumulation
    )
    assert trainer.searched_samples is None  # as always on a CPU
    trainer.searched_samples = trainer.loader.largest()
    trainer.fit()
    assert {(n, training) for n, training, _ in objective.seen} >= {(4, True), (3, True)}
    assert any(not training for _, training, _ in objective.seen)
    for n, training, searched in objective.seen:
        assert searched == (training and n == 4)


def test_trial_plans_are_not_reused_by_training():
    """`deterministic` is part of the key of PyTorch's plan cache."""
    torch.backends.cudnn.benchmark, seen = True, []

    def attempt():
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))

    assert succeeds(attempt) and seen == [(False, True)]
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
    with pytest.raises(ValueError), trial_plans():
        raise ValueError
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic


def test_scaled_dot_product_attention_does_not_use_cudnn():
    torch.backends.cuda.enable_cudnn_sdp(True)
    prefer_flash_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def attention_of_packed_texts(q, k, v, q_ends, ends, q_longest, longest, window):
    """FlashAttention on packed texts (rows, heads, width), in float64."""
    lengths = ends.diff()
    assert q_longest >= q_ends.diff().max() and longest >= lengths.max()
    assert window is None
    results = []
    for i in range(len(lengths)):
        own = slice(int(q_ends[i]), int(q_ends[i + 1]))
        text = slice(int(ends[i]), int(ends[i + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[text].double())
        weights = (scores * q.shape[2] ** -0.5).softmax(2)
        results.append(torch.einsum("hqk,khd->qhd", weights, v[text].double()))
    rows = torch.zeros(q.shape, dtype=torch.float64)  # rows beyond the texts stay 0
    rows[: int(q_ends[-1])] = torch.cat(results)
    return rows.to(q.dtype)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_packed_attention_equals_padded(monkeypatch, pooling):
    """Called as on a GPU, packed attention gives the logits of the padded layout."""
    torch.manual_seed(0)
    model = Transformer(50, 3, 2, 16, 2, 32, 200, dropout=0.0, pooling=pooling).eval()
    lengths = np.array([150, 3, 1, 40])
    tokens = np.arange(int(lengths.sum())) % 49 + 1
    texts = pack(tokens, np.cumsum(lengths) - lengths, lengths, CPU)
    expected = model(texts)
    asked = []

    def attend(*given):
        asked.append(given)
        return attention_of_packed_texts(*given)

    monkeypatch.setattr(transformer, "varlen_works", lambda *given: True)
    monkeypatch.setattr(transformer, "flash_attention", attend)
    torch.testing.assert_close(model(texts), expected)
    assert len(asked) == 2


def test_packed_attention_is_not_called_without_texts(monkeypatch):
    """A rank's share of a step may be empty, which FlashAttention refuses."""
    monkeypatch.setattr(transformer, "varlen_works", lambda *given: True)
    monkeypatch.setattr(transformer, "flash_attention", None)
    model = Transformer(50, 3, 2, 16, 2, 32, 200, dropout=0.0)
    none = np.array([], dtype=np.int64)
    logits = model(pack(none, none, none, CPU))
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_compiler_traces_the_choice_of_attention():
    """Without a break of the graph, although it cannot trace what the choice asks of a GPU."""

    def chosen(x):
        return x + 1 if transformer.has_flash_attention() else x

    x = torch.zeros(2)
    assert torch.equal(torch.compile(chosen, backend="eager", fullgraph=True)(x), chosen(x))


class FakeStreams:
    """Replaces the parts of torch.cuda that the loader uses; counts streams."""

    def __init__(self, monkeypatch):
        self.made = 0
        for name, value in {
            "Stream": self._make, "stream": lambda side: side, "current_stream": lambda d: self,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: None)

    def _make(self, device):
        self.made += 1
        return self

    def wait_stream(self, other):
        pass

    def record_event(self):
        pass

    wait_event = wait_stream

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_all_epochs_share_a_side_stream(monkeypatch):
    streams = FakeStreams(monkeypatch)
    whole = data_batch.side_stream.__wrapped__
    monkeypatch.setattr(data_batch, "side_stream", functools.cache(whole))
    data = loader(4)
    for epoch in range(3):
        batches = list(data.epoch(epoch))
        given = data_batch.one_ahead([lambda batch=batch: batch for batch in batches], CPU)
        assert all(one is other for one, other in zip(given, batches, strict=True))
    assert streams.made == 1
