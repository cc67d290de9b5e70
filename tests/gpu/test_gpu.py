"""Training, as far as only a GPU can show it; skipped where there is none."""

import gc
import time

import pytest
import torch
from toy import make_trainer, network, pictures, steps_of

from utils.checkpoints.checkpoint import read_checkpoint
from utils.data.images.loader import ImageLoader
from utils.errors import UserError
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.training.average import Average
from utils.training.guard import Guard
from utils.training.times import PhaseTimes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def run_epoch(trainer, epoch):
    for _ in steps_of(trainer, epoch):
        pass


def run_epoch_without_waiting(trainer, epoch):
    """Trains an epoch while CUDA refuses whatever makes the host wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_epoch(trainer, epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_wait_between_log_lines(tmp_path, optimizer, precision):
    trainer = make_trainer(
        tmp_path, device=CUDA, optimizer=optimizer, precision=precision, clip=1.0, accumulation=2
    )
    run_epoch(trainer, 0)  # sets up memory, kernels and states
    run_epoch_without_waiting(trainer, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_wait_with_an_average_and_a_frozen_backbone(tmp_path, optimizer, precision):
    trainer = make_trainer(
        tmp_path, device=CUDA, optimizer=optimizer, precision=precision, clip=1.0,
        accumulation=2, ema_decay=0.9, freeze_until=2,
    )  # fmt: skip
    frozen = trainer.steps.model[0].weight
    before = frozen.detach().clone()
    run_epoch(trainer, 0)
    run_epoch_without_waiting(trainer, 1)
    assert torch.equal(frozen, before)
    run_epoch(trainer, 2)  # makes the states of what trains from here on
    run_epoch_without_waiting(trainer, 3)
    if precision != "fp16":  # whose scaler may have skipped the few steps
        assert not torch.equal(frozen, before)
    shares = trainer.times.fractions()
    assert shares["forward_backward"] > 0 and sum(shares.values()) == pytest.approx(1, abs=0.01)


def test_the_profiler_shows_no_wait(tmp_path):
    trainer = make_trainer(tmp_path, device=CUDA, precision="bf16", clip=1.0, ema_decay=0.9)
    run_epoch(trainer, 0)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        run_epoch(trainer, 1)
    names = {event.name for event in profile.events()}
    waits = {n for n in names if "Synchronize" in n and n != "cudaDeviceSynchronize"}
    assert not waits, waits  # the profiler itself ends with cudaDeviceSynchronize


def test_a_whole_run_and_its_resume(tmp_path):
    whole = make_trainer(tmp_path / "whole", device=CUDA, epochs=2)
    assert whole.fit().step == whole.plan.total_steps
    again = make_trainer(tmp_path / "whole", device=CUDA, epochs=3)
    again.restore(again.saver.store.load())
    assert again.fit().step == again.plan.total_steps


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


# ---- average, times, memory, checkpoints --------------------------------------------------------


def test_the_average_is_that_of_the_cpu():
    models = [network().to(device) for device in (CUDA, CPU)]
    for model in models:
        Guard(model)
    ours, expected = (Average(model, 0.9) for model in models)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        for name, tensor in expected.live.items():
            change = torch.randn(tensor.shape, generator=generator)
            tensor.data.add_(change)
            ours.live[name].data.copy_(tensor)
        left_out = step == 7
        before = {name: mean.clone() for name, mean in ours.mean.items()}
        ours.update(ours.ema_weight(step), torch.tensor(left_out, device=CUDA))
        expected.update(expected.ema_weight(step), torch.tensor(left_out))
        for name, mean in ours.mean.items():
            assert torch.equal(mean, before[name]) == left_out, name
            torch.testing.assert_close(mean.cpu(), expected.mean[name], rtol=1e-5, atol=1e-6)


def test_times_are_those_of_the_device():
    """The host is done at once; the fractions are those of the device's work."""
    times, cycles = PhaseTimes(CUDA), 50_000_000  # some 30 ms
    torch.cuda._sleep(20 * cycles)  # until the GPU's clock has sped up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started = time.perf_counter()
        times.mark("other")
        for phase, amount in (("data", 1), ("forward_backward", 3), ("optimizer", 1)):
            torch.cuda._sleep(amount * cycles)
            times.mark(phase)
        host = time.perf_counter() - started
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    device = time.perf_counter() - started
    times.read()
    assert host < device / 2
    assert sum(times.seconds.values()) == pytest.approx(device, rel=0.2)
    shares = times.fractions()
    assert shares["forward_backward"] == pytest.approx(0.6, abs=0.1)
    assert shares["data"] == pytest.approx(0.2, abs=0.1)
    assert shares["checkpoint"] == 0


def large(batch_size):
    images, labels = pictures(4096, size=32)
    return ImageLoader(
        images, labels, mean=(0.5,) * 3, std=(0.25,) * 3, batch_size=batch_size, device=CUDA,
        shuffle=True,
    )  # fmt: skip


def test_out_of_memory_names_half_of_the_batch_and_leaves_nothing(tmp_path):
    """With 300 MiB, of which a batch of 4,096 pictures needs more."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    room = torch.cuda.memory_reserved(CUDA) + (300 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total, CUDA)
    try:
        trainer = make_trainer(tmp_path / "first", device=CUDA, data=large(4096))
        with pytest.raises(UserError, match="--batch_size 4096 does not fit") as error:
            trainer.fit()
        assert "--batch_size 2048 may; --accumulation_steps 2 " in str(error.value)
        assert trainer.saver.store.steps() == []  # it failed in the first step
        del trainer, error
        gc.collect()
        torch.cuda.empty_cache()
        again = make_trainer(tmp_path / "again", device=CUDA, data=large(256), max_steps=3)
        assert again.fit().step == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


def test_a_checkpoint_holds_the_step_at_which_it_was_taken(tmp_path, monkeypatch):
    """Although the device trains further steps while it is written."""
    trainer = make_trainer(
        tmp_path, device=CUDA, optimizer="adamw", epochs=2, save_steps=2, ema_decay=0.9
    )
    seen, save, write = {}, trainer.save, trainer.saver.store.save

    def saved(final=False):
        save(final)
        torch.cuda.synchronize()
        states = trainer.steps.model.state_dict(), trainer.steps.average.state_dict()
        seen[trainer.progress.step] = [
            {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            for state in states
        ]

    def written(checkpoint, *args):
        time.sleep(0.3)  # meanwhile the next steps are trained
        return write(checkpoint, *args)

    monkeypatch.setattr(trainer, "save", saved)
    monkeypatch.setattr(trainer.saver.store, "save", written)
    trainer.fit()
    assert len(seen) >= 5 and trainer.plan.total_steps in seen
    for step, (model, average) in seen.items():
        checkpoint = read_checkpoint(tmp_path / "checkpoints" / f"step-{step:08}")
        assert checkpoint.state["progress"]["step"] == step
        for ours, expected in ((checkpoint.model, model), (checkpoint.weights, average)):
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[name], expected[name]) for name in expected)
