"""--auto_batch on a GPU: the size found fits, twice it does not, and the probe leaves no trace."""

import gc

import pytest
import torch
from toy import make_trainer, network, pictures

from utils.data.images.loader import ImageLoader
from utils.optim.factory import build_optimizer
from utils.training.batch_probe import largest_that_fits
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)
ROOM = 300 << 20  # bytes, of which a batch of 4,096 pictures needs more


def large(batch_size=4096, accumulation=1):
    images, labels = pictures(8192, size=32)
    return ImageLoader(
        images, labels, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=batch_size, device=CUDA,
        shuffle=True, accumulation=accumulation,
    )  # fmt: skip


def probe(model, data, available, optimizer="adamw"):
    objective = Classification(model, Precision("fp32", CUDA))

    def passes(batch):
        loss, _ = objective(batch.inputs, batch.targets, batch.mix_plan)
        (loss / batch.step_samples).backward()
        yield

    return largest_that_fits(
        model,
        data,
        passes=passes,
        build_optimizer=lambda: build_optimizer(optimizer, model, lr=0.1, weight_decay=0.1),
        averaged=True,
        available=available,
    )


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Lets libraries allocate what they keep, such as cuBLAS's workspace (32 MiB on an H100),
    before memory is counted."""
    probe(network().to(CUDA), large(256), torch.cuda.memory_allocated(CUDA) + (8 << 30))


@pytest.fixture(autouse=True)
def clean_memory(libraries):
    gc.collect()
    torch.cuda.empty_cache()


def test_the_size_found_fits_and_twice_as_much_does_not(tmp_path):
    data, model = large(), network().to(CUDA)
    available = torch.cuda.memory_allocated(CUDA) + ROOM
    found = probe(model, data, available)
    assert found.size is not None and 64 <= found.size < 4096 and 4096 % found.size == 0
    assert found.needed <= available
    del data
    twice = large(2 * found.size)
    available = torch.cuda.memory_allocated(CUDA) + ROOM
    assert probe(model, twice, available).size == found.size  # cut to that size
    del twice, model
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((available + (64 << 20)) / total, CUDA)
    try:
        count = 4096 // found.size
        trainer = make_trainer(
            tmp_path, device=CUDA, data=large(found.size, count), optimizer="adamw", ema_decay=0.9,
            max_steps=2,
        )  # fmt: skip
        assert trainer.fit().step == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "ngd", "muon", "lamb"])
def test_no_trace_is_left(optimizer):
    model = network(dropout=0.3).to(CUDA)
    data = large(256)
    random = torch.cuda.get_rng_state(CUDA)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    allocated = torch.cuda.memory_allocated(CUDA)
    assert probe(model, data, allocated + (8 << 30), optimizer).size == 256
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(random, torch.cuda.get_rng_state(CUDA))
    assert all(p.grad is None for p in model.parameters())
    gc.collect()
    assert torch.cuda.memory_allocated(CUDA) <= allocated + (1 << 20)  # a batch takes 3 MiB


def test_none_is_found_where_nothing_fits():
    model, data = network().to(CUDA), large()
    assert probe(model, data, torch.cuda.memory_allocated(CUDA) + 4096).size is None
