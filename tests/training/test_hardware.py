"""How well the GPUs are used: FLOPs, MFU, the GPU's own figures. With stand-ins for the GPU."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
import toy
from torch import nn

from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.runs import make_trainer
from utils.training import hardware
from utils.training.flops import PEAKS, forward_flops, peak_of
from utils.training.hardware import FIGURES, Hardware, Readings, hardware_text
from utils.training.objective import Precision

# ---- operations ---------------------------------------------------------------------------------


def test_flops_of_convolutions_and_products():
    """By hand: 2 operations for each weight and place."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 5))
    by_hand = 2 * (3 * 8 * 9) * 36 + 2 * 8 * 36 * 5
    assert forward_flops(model, torch.zeros(1, 3, 6, 6)) == by_hand


def test_flops_of_a_published_network():
    """4.09 billion products, as torchvision tells of its ResNet-50 for pictures of 224 pixels."""
    flops = forward_flops(ResNet(50, 1000, 64, "imagenet"), torch.zeros(1, 3, 224, 224))
    assert flops == pytest.approx(2 * 4.09e9, rel=0.001)


def test_flops_of_a_text_grow_with_its_length():
    """Attention included: the scores and their sums are products of every pair of tokens."""
    model = Transformer(50, 4, layers=2, dim=16, heads=2, ffn=32, max_len=64, pooling="mean")
    one, two = (forward_flops(model, torch.ones(1, n, dtype=torch.long)) for n in (20, 40))
    head = 2 * 16 * 4

    def by_hand(n: int) -> int:
        return 2 * (2 * n * 16 * (4 * 16 + 2 * 32) + 2 * 2 * n * n * 16) + head

    assert (one, two) == (by_hand(20), by_hand(40))


def test_counting_changes_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU())
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    assert forward_flops(model, torch.ones(2, 3, 5, 5)) > 0
    assert model.training and torch.equal(state, torch.random.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_that_cannot_be_traced_is_not_counted():
    class Reads(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    assert forward_flops(Reads(), torch.ones(3)) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, peak):
    assert peak_of(name, "bf16") == peak
    assert peak_of(name, "fp32") is None
    assert len({part for part, _ in PEAKS}) == len(PEAKS)


# ---- figures ------------------------------------------------------------------------------------


def test_readings_are_averaged_and_memory_is_the_largest():
    readings = Readings()
    assert readings.values() == {}
    readings.add({"gpu_use": 90.0, "gpu_memory_bytes": 5.0})
    readings.add({"gpu_use": 100.0, "gpu_memory_bytes": 3.0})
    assert readings.take() == {"gpu_use": 95.0, "gpu_memory_bytes": 5.0}
    readings.add({"gpu_use": 10.0})
    assert readings.values() == {"gpu_use": 10.0}


def test_a_thread_reads_the_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "SECONDS", 0.001)
    read_twice, counted = threading.Event(), []

    def read() -> dict[str, float]:
        counted.append(threading.current_thread().name)
        if len(counted) > 2:
            read_twice.set()
        return {"gpu_use": 97.0, "gpu_power_watts": 612.04}

    gpus = Hardware(read, gpus=4, gpu_seconds=lambda: 7200.0, flops=1e9, peak=100e12)
    assert read_twice.wait(60)
    # 3e9 operations for each of 40,000 samples a second, of the 400e12 that four GPUs could do.
    assert gpus.figures(40_000.0) == {
        "gpu_use": 97.0, "gpu_power_watts": 612.0, "mfu": 30.0, "gpu_hours": 2.0
    }  # fmt: skip
    gpus.close()
    assert not gpus._thread.is_alive() and {*counted} == {"gpu"}
    summary = gpus.summary(None)
    assert set(summary) == {*FIGURES}
    assert (summary["mfu"], summary["gpu_memory_bytes"], summary["gpu_use"]) == (None, None, 97.0)


def test_without_a_gpu_nothing_is_known():
    nothing = Hardware()
    assert nothing.figures(100.0) == {} and nothing.summary(100.0) == dict.fromkeys(FIGURES)
    assert hardware_text({}) == ""
    nothing.close()


def test_log_lines_and_records_have_the_figures(tmp_path, capsys):
    figures = {"mfu": 41.04, "gpu_use": 97.2, "gpu_power_watts": 612.0, "gpu_memory_bytes": 64e9}
    gpu = SimpleNamespace(figures=lambda speed: figures | {"gpu_hours": 1.5})
    trainer = toy.make_trainer(tmp_path)
    log = trainer.log
    log.hardware = gpu
    sums = {"loss": 2.0, "correct": 1.0, "samples": 2.0}
    log.show(sums, 0.1, 100)  # after the first step: nothing is known yet
    assert capsys.readouterr().out == "epoch 0.10: train loss 1.0000, accuracy 50.00 %\n"
    log.console._last_plain = float("-inf")
    log.show(sums, 0.5, 100, 10.0, gpu.figures(10.0))
    line = capsys.readouterr().out
    assert line.endswith("0:10 left, MFU 41.0 %, GPU 97 %, 612 W, 64.0 GB\n")
    trainer.fit()
    assert toy.history(tmp_path)[0].items() >= (figures | {"gpu_hours": 1.5}).items()


def test_a_run_on_a_gpu_asks_its_own(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="12")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        make_trainer,
        "open_gpu",
        lambda uuid: SimpleNamespace(read=lambda: {"gpu_use": 50.0}) if uuid == "12" else None,
    )
    precision = Precision("bf16", torch.device("cuda", 0))
    clock = SimpleNamespace(gpus=1, gpu_seconds=3600.0)
    gpus = make_trainer._hardware(precision, True, 1e9, clock)
    assert gpus.summary(1e5)["mfu"] == pytest.approx(100 * 3e14 / 989e12, abs=0.01)
    assert gpus.summary(None)["gpu_hours"] == 1.0
    gpus.close()
    gpus = make_trainer._hardware(precision, False, 1e9, clock)
    assert gpus.summary(1e5) == dict.fromkeys(FIGURES)
