"""--check and the figures of the log on a real GPU; skipped where there is none."""

import json

import pytest
import torch

from utils.training.flops import peak_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FLAGS = "--dataset shapes --depth 18 --width 8 -b 50 --precision bf16 --log_every 2 --output run"


def test_a_gpu_is_checked(run_resnet, tmp_path):
    assert run_resnet("--check") == 0
    (file,) = (tmp_path / "runs").glob("check-*.json")
    report = json.loads(file.read_text())
    (own,) = report["ranks"]
    assert own["device"]["type"] == "cuda" and own["driver"]
    assert max(report["fused"].values()) <= 1e-4


def test_the_summary_tells_how_well_the_gpu_is_used(run_resnet, tmp_path):
    assert run_resnet(f"{FLAGS} --epochs 2") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["gpu_hours"] > 0
    if peak_of(torch.cuda.get_device_name(), "bf16"):
        assert 0 <= summary["mfu"] < 100  # in hundredths of a per cent; this network is tiny
    if summary["gpu_use"] is not None:  # with nvidia-ml-py
        assert 0 <= summary["gpu_use"] <= 100
        assert summary["gpu_power_watts"] > 0
        assert summary["gpu_memory_bytes"] >= summary["peak_memory_bytes"]
