"""What only a GPU can show; skipped, with the reason, where there is none."""

import numpy as np
import pytest
import torch
from toy import make_trainer, pictures

from utils.augment.crop_flip import CropFlip
from utils.data.loader import ImageLoader
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.training.guard import Guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)


def loader(device, n=203, **options):
    images, labels = pictures(n, size=32)
    return ImageLoader(
        images, labels, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=16, device=device,
        augment=CropFlip(32, 32, cutout=8), shuffle=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("resident", [True, False])
def test_batches_equal_those_of_the_cpu(resident, monkeypatch):
    if not resident:
        monkeypatch.setattr("utils.data.loader.GPU_SHARE", 0.0)
    on_gpu, on_cpu = loader(CUDA), loader(torch.device("cpu"))
    assert (on_gpu.images.device.type == "cuda") == resident
    count = 0
    for ours, expected in zip(on_gpu.epoch(1), on_cpu.epoch(1), strict=True):
        torch.testing.assert_close(ours.inputs.cpu(), expected.inputs, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.targets.cpu(), expected.targets)
        count += len(ours.targets)
    assert count == 203


def run_epoch(trainer, epoch):
    trainer.guard.remember()
    for batch in trainer.loader.epoch(epoch):
        trainer.forward_backward(batch)
        if batch.ends_step:
            trainer.update()
            trainer.guard.remember()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_wait_between_log_lines(tmp_path, optimizer, precision):
    """An epoch of the trainer's own steps in which CUDA refuses whatever makes the host wait."""
    trainer = make_trainer(
        tmp_path, device=CUDA, optimizer=optimizer, precision=precision, clip=1.0, accumulation=2
    )
    trainer.model.train()
    run_epoch(trainer, 0)  # sets up memory, kernels and states
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_epoch(trainer, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_profiler_shows_no_wait(tmp_path):
    trainer = make_trainer(tmp_path, device=CUDA, precision="bf16", clip=1.0)
    trainer.model.train()
    run_epoch(trainer, 0)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        run_epoch(trainer, 1)
    names = {event.name for event in profile.events()}
    waits = {n for n in names if "Synchronize" in n and n != "cudaDeviceSynchronize"}
    assert not waits, waits  # the profiler itself ends with cudaDeviceSynchronize


def test_a_whole_run_and_its_resume(tmp_path):
    whole = make_trainer(tmp_path / "whole", device=CUDA, epochs=2)
    assert whole.fit().step == whole.total_steps
    again = make_trainer(tmp_path / "whole", device=CUDA, epochs=3)
    again.restore(again.saver.store.load())
    assert again.fit().step == again.total_steps


def test_a_step_that_is_not_finite_leaves_no_trace():
    model = ResNet(18, 3, 8).to(CUDA, memory_format=torch.channels_last)
    for name in ("sgd", "adamw"):
        optimizer, guard = build_optimizer(name, model, lr=0.1, weight_decay=0.1), Guard(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        guard.remember()
        inputs = torch.full((4, 3, 32, 32), float("nan"), device=CUDA)
        loss = model(inputs).sum()
        loss.backward()
        bad = guard.judge(loss, guard.gradient_norm(), 0, False)
        optimizer.found_inf = bad.float()
        optimizer.step()
        guard.take_back(bad)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key


def test_picture_order_does_not_depend_on_the_device():
    orders = [loader(device).order(3) for device in (CUDA, torch.device("cpu"))]
    assert np.array_equal(*orders)
