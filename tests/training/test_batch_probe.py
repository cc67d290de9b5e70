"""The probe counts what autograd keeps, finds the largest size that fits, and leaves no trace."""

import numpy as np
import pytest
import torch
from torch import nn
from toy import CPU, loader, network

from utils.data.texts.loader import TextLoader
from utils.models.transformer import Transformer
from utils.optim.factory import build_optimizer
from utils.training import batch_probe
from utils.training.batch_probe import (
    CPU_FACTOR,
    CPU_ONCE,
    KeptBytes,
    first_that_fits,
    kept_by,
    largest_that_fits,
)
from utils.training.objective import Classification, Precision


def passes_of(model, seen=None):
    objective = Classification(model, Precision("fp32", CPU))

    def passes(batch):
        loss, _ = objective(batch.inputs, batch.targets, batch.mix_plan)
        (loss / batch.step_samples).backward()
        if seen is not None:
            seen.append(batch.step_samples)
        yield

    return passes


def probe(model, data, available, optimizer="adamw", averaged=False, seen=None, **options):
    return largest_that_fits(
        model,
        data,
        passes=passes_of(model, seen),
        build_optimizer=lambda: build_optimizer(optimizer, model, lr=0.1, weight_decay=0.1),
        averaged=averaged,
        available=available,
        **options,
    )


class Sigmoids(nn.Sequential):
    """Keeps (n, 100) float32 for each of three sigmoids, and the input of the linear layer."""

    def __init__(self):
        super().__init__(nn.Linear(10, 100), nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())


@pytest.mark.parametrize("n", [1, 7])
def test_each_memory_is_counted_once_and_until_it_is_freed(n):
    model, kept = Sigmoids(), KeptBytes(nn.Module())
    inputs = torch.randn(n, 10)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            out = model(inputs)
        assert kept.most == 4 * n * (10 + 3 * 100)
        out.sum().backward()
        del out
        assert kept.now == 0


def test_parameters_do_not_count():
    model = Sigmoids()
    kept = KeptBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        out = model(torch.randn(2, 10, requires_grad=True))  # autograd keeps the weight, too
    assert kept.most == 4 * 2 * (10 + 3 * 100) and out.requires_grad


def test_counting_does_not_change_gradients():
    results = []
    for count in (True, False):
        model = network()
        batch = loader(6).trial(6)
        if count:
            kept_by(model, passes_of(model), batch)
        else:
            list(passes_of(model)(batch))
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def needed(model, n) -> float:
    """The bytes that micro-batches of n samples need, by the probe."""
    data = loader(n, n=2 * n)
    return probe(model, data, 1e12).needed


def test_the_largest_size_within_a_limit_is_found():
    model = network()
    limits = {size: needed(model, size) for size in (2, 4, 8, 16)}
    assert sorted(limits.values()) == list(limits.values())
    for size, limit in limits.items():
        data, seen = loader(16, n=32), []
        found = probe(model, data, limit, seen=seen)
        assert found.size == data.batch_size == size and found.needed <= limit
        assert seen == [2, 6]  # nothing larger than these is tried on a CPU
    data = loader(16, n=32)
    assert probe(model, data, limits[2] - 1).size is None


def test_the_extrapolation_meets_what_a_large_batch_keeps():
    model = network(dropout=0.0)
    (kept,) = kept_by(model, passes_of(model), loader(64, n=64).trial(64))
    beside = needed(model, 64) * (1 - batch_probe.CPU_RESERVE) - CPU_ONCE - CPU_FACTOR * kept
    weights = sum(4 * p.numel() for p in model.parameters())
    assert 3 * weights <= beside <= 3 * weights + 4096  # gradients and the moments of adamw


def test_what_many_texts_keep_is_extrapolated_from_few_short_ones():
    """Although under autocast the number of rows is rounded up."""
    lengths, rng = np.full(64, 10), np.random.default_rng(0)
    data = TextLoader(
        rng.integers(2, 50, lengths.sum()), np.arange(65) * 10, np.zeros(64, np.int64),
        batch_size=64, device=CPU, max_len=12,
    )  # fmt: skip
    model = Transformer(50, 3, layers=1, dim=16, heads=4, ffn=24, max_len=12, dropout=0.0)

    def passes(batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch.inputs)
        yield
        logits.float().sum().backward()
        yield

    probe = batch_probe.CPUProbe(model, data, passes, [], 1e9)
    assert model.rounds_rows
    line = max(base + (64 - probe.least) * each for base, each in probe.bytes_of_passes)
    assert line == pytest.approx(max(kept_by(model, passes, data.trial(64))), rel=0.05)


def test_recomputed_activations_need_memory_too():
    model = network(dropout=0.0)
    plain, model.fused = needed(model, 64), "memory"
    (kept,) = kept_by(model, passes_of(model), loader(64, n=64).trial(64))
    more = (needed(model, 64) - plain) * (1 - batch_probe.CPU_RESERVE)
    assert more == pytest.approx((batch_probe.CPU_FACTOR_RECOMPUTED - CPU_FACTOR) * kept)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "ngd", "muon"])
def test_no_trace_is_left(optimizer):
    model = network(dropout=0.3)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    assert probe(model, loader(8), 1e12, optimizer, averaged=True).size == 8
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(random, torch.get_rng_state())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_the_average_and_the_optimizers_state_are_included():
    model = network()
    weights = sum(4 * p.numel() for p in model.parameters())
    by = {
        (optimizer, averaged): probe(model, loader(8), 1e12, optimizer, averaged).needed
        for optimizer in ("sgd", "adamw")
        for averaged in (False, True)
    }
    part = weights / (1 - batch_probe.CPU_RESERVE)
    assert by["sgd", True] - by["sgd", False] == pytest.approx(part, rel=0.01)
    assert by["adamw", False] - by["sgd", False] == pytest.approx(part, rel=0.1)  # and counters


@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_the_first_that_fits_is_found(count):
    for first in range(count + 1):
        asked = []

        def fits(index, first=first, asked=asked):
            asked.append(index)
            return index >= first

        assert first_that_fits(fits, count) == first
        assert min(first, count - 1) in asked and len(asked) == len(set(asked)) <= 4 + (count > 7)


def test_nothing_fits_if_the_optimizers_state_does_not():
    model = network()

    def no_room():
        raise torch.OutOfMemoryError("no room")

    found = largest_that_fits(
        model, loader(8), passes=passes_of(model), build_optimizer=no_room, averaged=False,
        available=1e12,
    )  # fmt: skip
    assert found.size is None


class FakeCuda:
    """Replaces functions of torch.cuda: a GPU with 1,000 bytes, 100 of them in use."""

    def __init__(self, monkeypatch):
        self.most = 0
        for name, found in (("mem_get_info", (880, 1000)), ("memory_allocated", 100),
                            ("memory_reserved", 120), ("empty_cache", None),
                            ("synchronize", None)):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.most)

    def reset(self, *_):
        self.most = 0


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("no room"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["PyTorch", "cuDNN", "Triton"],
)
def test_on_a_gpu_sizes_are_tried_with_the_reserve_held(failure, monkeypatch):
    cuda, room = FakeCuda(monkeypatch), 5

    def passes(batch):
        if batch.step_samples > room:
            raise failure
        cuda.most = 500 + 50 * batch.step_samples
        yield

    tried = batch_probe.GPUProbe(network(), loader(8), passes, [], 1000.0)
    assert len(tried.held) == 50  # 5 % of what is available
    assert tried.needed(6) == float("inf")
    assert tried.needed(4) == 500 + 50 * 4  # with the reserve in place of what is held
    assert len(batch_probe.GPUProbe(network(), loader(8), passes, [], 600.0).held) == 430
