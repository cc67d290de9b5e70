"""What NVML says of a GPU, with a stand-in for pynvml."""

import sys
from types import SimpleNamespace

import pytest

from utils.machine.nvml import driver_version, open_gpu


class FakeNvml:
    """One GPU, "GPU-12"."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.works, self.refused = True, set()

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in self.refused:

            def refuse(*_):
                raise self.NVMLError("Not Supported")

            return refuse
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-12":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetPowerUsage(self, handle) -> int:
        return 612_500  # milliwatts

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=64 << 30)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_figures_of_a_gpu(nvml):
    gpu = open_gpu("12")
    assert gpu.read() == {
        "gpu_use": 97.0, "gpu_power_watts": 612.5, "gpu_memory_bytes": float(64 << 30)
    }  # fmt: skip
    nvml.refused = {"nvmlDeviceGetPowerUsage"}
    assert gpu.read().keys() == {"gpu_use", "gpu_memory_bytes"}
    assert driver_version() == "550.54.15"


def test_without_the_package_the_library_or_the_gpu(nvml, monkeypatch, tmp_path):
    assert open_gpu("MIG-7") is None
    nvml.works = False
    file = tmp_path / "version"
    assert open_gpu("12") is None and driver_version(file) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu("12") is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n")
    assert driver_version(file) == "570.86.10"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert driver_version(file) == "535.104.05"
