"""The answers to all samples, whatever the order, the batches and the ranks."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from utils.exchange import Exchange
from utils.measures import outcomes as module
from utils.measures.outcomes import LARGEST, MOST_CLASSES, Outcomes, answers_of

SAMPLES = 230


class Threads(Exchange):
    """Ranks that are threads of this process."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, (self.barrier_of_all, self.given) = rank, size, shared

    def gather(self, tensor):
        self.given[self.rank] = tensor
        self.barrier_of_all.wait(30)
        found = [self.given[rank] for rank in range(self.size)]
        self.barrier_of_all.wait(30)
        return found

    gather_json = gather


def recorded(logits, targets, ranks=1, batch=32, seed=0):
    """Those of rank 0. Samples are visited in a random order, and divided among the ranks."""
    order = np.random.default_rng(seed).permutation(len(targets))
    visited = np.array_split(order, ranks)
    shared = threading.Barrier(ranks), {}

    def run(rank):
        exchange = Threads(rank, ranks, shared) if ranks > 1 else Exchange()
        found = Outcomes(logits.shape[1], visited, exchange)
        for start in range(0, len(visited[rank]), batch):
            own = visited[rank][start : start + batch]
            found.add(logits[own], targets[own])
        found.finish()
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return next(iter(list(pool.map(run, range(ranks)))))


def answers(classes):
    generator = torch.Generator().manual_seed(classes)
    logits = 2 * torch.randn(SAMPLES, classes, generator=generator)
    return logits, torch.randint(0, classes, (SAMPLES,), generator=generator)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("classes", [2, MOST_CLASSES, MOST_CLASSES + 1])
def test_each_sample_has_its_answer(classes, ranks, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 50)
    logits, targets = answers(classes)
    chunks = recorded(logits, targets, ranks).chunks()
    found = [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
    p = torch.softmax(logits.double(), 1).numpy()
    assert np.array_equal(found[0], targets)
    np.testing.assert_allclose(
        found[1], -np.log(p[np.arange(SAMPLES), targets]), rtol=1e-5, atol=1e-6
    )
    order = np.argsort(-p, 1)[:, :LARGEST]
    if classes <= MOST_CLASSES:
        order = np.tile(np.arange(classes), (SAMPLES, 1))
    assert np.array_equal(found[2], order)
    np.testing.assert_allclose(found[3], np.take_along_axis(p, order, 1), rtol=1e-5)
    expected = answers_of(p)
    assert np.array_equal(found[2], expected[0])


class Full:
    """A file on a full disk, which is noticed by one of its methods."""

    def __init__(self, method):
        self.method = method

    def _use(self, method):
        if method == self.method:
            raise OSError(28, "No space left on device")

    def seek(self, place):
        pass

    def write(self, content):
        self._use("write")

    def flush(self):
        self._use("flush")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["write", "flush"])
def test_a_full_disk_is_told_and_ends_nothing(ranks, method, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Full(method))
    assert "No space left" in recorded(*answers(3), ranks).failure
