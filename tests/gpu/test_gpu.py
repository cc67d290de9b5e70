"""What only a GPU can show; skipped, with the reason, where there is none."""

import numpy as np
import pytest
import torch
from toy import pictures

from utils.augment.crop_flip import CropFlip
from utils.data.loader import ImageLoader
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.training.guard import Guard
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda")


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_wait_between_log_lines(optimizer, precision, monkeypatch):
    """Ten steps in which CUDA refuses every call that makes the host wait."""
    arithmetic = Precision(precision, CUDA)
    model = ResNet(18, 3, 16).to(CUDA, memory_format=torch.channels_last)
    objective, scaler, guard = Classification(model, arithmetic), arithmetic.scaler(), Guard(model)
    optimizer = build_optimizer(optimizer, model, lr=0.01, weight_decay=1e-4)

    def steps(batches):
        for batch in batches:
            guard.remember()
            loss, sums = objective(batch.inputs, batch.targets)
            scaler.scale(loss / batch.step_samples).backward()
            scaler.unscale_(optimizer)
            norm = guard.gradient_norm()
            bad = guard.judge(sums[0], norm, 0, scaler.is_enabled())
            torch.nn.utils.clip_grads_with_norm_(guard.parameters, 1.0, norm)
            optimizer.found_inf = bad.float()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scaler.update()
            guard.take_back(bad)

    data = loader(CUDA)
    steps(data.epoch(0))  # sets up memory, kernels and states
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(data.epoch(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_profiler_shows_no_wait(tmp_path):
    arithmetic = Precision("bf16", CUDA)
    model = ResNet(18, 3, 16).to(CUDA, memory_format=torch.channels_last)
    objective = Classification(model, arithmetic)
    optimizer = build_optimizer("sgd", model, lr=0.01, weight_decay=1e-4)
    data = loader(CUDA)

    def steps(epoch):
        for batch in data.epoch(epoch):
            loss, _ = objective(batch.inputs, batch.targets)
            (loss / batch.step_samples).backward()
            optimizer.found_inf = torch.zeros((), device=CUDA)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    steps(0)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        steps(1)
    names = {event.name for event in profile.events()}
    waits = {n for n in names if "Synchronize" in n and n != "cudaDeviceSynchronize"}
    assert not waits, waits  # the profiler itself ends with cudaDeviceSynchronize


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
