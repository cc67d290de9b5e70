"""Batches on a GPU are those of the CPU, and made without a wait of the host."""

import numpy as np
import pytest
import torch
from data.worker_helpers import mapped, worker_processes
from toy import pictures

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import RandomErasing
from utils.data.images.loader import ImageLoader
from utils.data.workers import WorkerPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
N, SIZE = 203, 32


def augmentation():
    crop = CropFlip(SIZE, SIZE, cutout=8)
    return Chain(crop, RandomErasing(SIZE, SIZE, 0.7, (10, 200, 30)))


def loader(device, images=None, labels=None, **options):
    """A loader of N pictures, or of those that are given."""
    if images is None:
        images, labels = pictures(N, size=SIZE)
    options = {"augment": augmentation(), "shuffle": True} | options
    return ImageLoader(
        images, labels, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=16, device=device, **options
    )


@pytest.fixture
def in_host_memory(monkeypatch):
    """Pretends that the GPU has no room for pictures."""
    monkeypatch.setattr("utils.data.images.loader.GPU_FRACTION", 0.0)


@pytest.fixture
def pool():
    said = []
    made = WorkerPool(2, 17 * SIZE * SIZE * 3, said.append)
    yield made
    made.close()
    assert not said


def assert_same_batches(on_gpu, on_cpu, samples=N) -> None:
    count = 0
    for epoch, start in ((1, 0), (2, 3)):
        batches = zip(on_gpu.epoch(epoch, start), on_cpu.epoch(epoch, start), strict=True)
        for ours, expected in batches:
            assert ours.inputs.device.type == ours.targets.device.type == "cuda"
            torch.testing.assert_close(ours.inputs.cpu(), expected.inputs, rtol=1e-6, atol=1e-6)
            assert torch.equal(ours.targets.cpu(), expected.targets)
            assert ours[2:] == expected[2:]
            count += len(ours.targets) if epoch == 1 else 0
    assert count == samples


@pytest.mark.parametrize("accumulation", [1, 3])
def test_resident_pictures(accumulation):
    ours, expected = (loader(device, accumulation=accumulation) for device in (CUDA, CPU))
    assert ours.images.device.type == "cuda"
    assert_same_batches(ours, expected)


def test_pictures_in_host_memory(in_host_memory):
    ours = loader(CUDA)
    assert ours.images.device.type == "cpu"
    assert_same_batches(ours, loader(CPU))


def test_a_resident_part_of_the_pictures():
    """Only the split's own pictures are uploaded if it shares an array with others."""
    images, _ = pictures(N, size=SIZE)
    rows = np.random.default_rng(0).permutation(N)[:77]
    labels = np.arange(77, dtype=np.int64)
    ours, expected = (loader(device, images, labels, rows=rows) for device in (CUDA, CPU))
    assert len(ours.images) == 77 and ours.rows is None
    assert np.array_equal(ours.images.cpu().numpy(), images[rows])
    assert_same_batches(ours, expected, 77)


@pytest.mark.parametrize("part", [False, True])
def test_worker_processes(tmp_path, in_host_memory, pool, part):
    images = mapped(tmp_path / "images.npy", N, SIZE, SIZE)
    rows = np.random.default_rng(0).permutation(N)[:150] if part else None
    labels = np.arange(N if rows is None else len(rows), dtype=np.int64)
    ours = loader(CUDA, images, labels, rows=rows, pool=pool)
    assert ours.images.device.type == "cpu"
    assert_same_batches(ours, loader(CPU, images, labels, rows=rows), len(labels))


def test_resident_pictures_need_no_worker_processes(tmp_path, pool):
    images = mapped(tmp_path / "images.npy", N, SIZE, SIZE)
    ours = loader(CUDA, images, np.arange(N, dtype=np.int64), pool=pool)
    assert ours.images.device.type == "cuda"
    assert_same_batches(ours, loader(CPU, images, np.arange(N, dtype=np.int64)))
    assert not worker_processes()


@pytest.mark.parametrize("place", ["gpu", "host", "map"])
def test_no_wait_while_batches_are_made(request, tmp_path, place):
    """With Chain and RandomErasing on the device, and with copies of batches from the host."""
    images, options = mapped(tmp_path / "images.npy", N, SIZE, SIZE), {}
    if place != "gpu":
        request.getfixturevalue("in_host_memory")
    if place == "map":
        options["pool"] = request.getfixturevalue("pool")
    data = loader(CUDA, images, np.arange(N, dtype=np.int64), **options)
    list(data.epoch(0))  # sets up memory and kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [batch.inputs for batch in data.epoch(1)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(map(len, batches)) == N


def test_picture_order_does_not_depend_on_the_device():
    orders = [loader(device).order(3) for device in (CUDA, CPU)]
    assert np.array_equal(*orders)
