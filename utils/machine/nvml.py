"""What NVIDIA's management library (NVML) says of a GPU: use, power, memory, driver.

The package nvidia-ml-py, imported as pynvml, is optional. Its calls ask the driver and put nothing
on a CUDA stream, so that they do not wait for the GPU's work.
"""

import contextlib
import re
from pathlib import Path


class Gpu:
    """A GPU as NVML sees it.

    Args:
        nvml: the module pynvml.
        handle: NVML's of the GPU.
    """

    def __init__(self, nvml, handle):
        self._nvml, self._handle = nvml, handle

    def read(self) -> dict[str, float]:
        """Its present figures: `gpu_use` (percent of the last moment in which a kernel ran),
        `gpu_power_watts` and `gpu_memory_bytes` (of all processes). What it does not tell is left
        out."""
        nvml, handle = self._nvml, self._handle
        figures = {
            "gpu_use": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        }
        found = {}
        for name, figure in figures.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = float(figure())
        return found


def open_gpu(uuid: str) -> Gpu | None:
    """The GPU with this identifier, as torch.cuda.get_device_properties has it. None without the
    package or the library, or for a part of a GPU (MIG)."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"))
    except nvml.NVMLError:
        return None


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Of NVIDIA's driver; None: there is none.

    Args:
        file: read where NVML is missing.
    """
    nvml = _nvml()
    if nvml is not None:
        with contextlib.suppress(nvml.NVMLError):
            version = nvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else version
    try:
        found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _nvml():
    """The module pynvml, ready for use; None: the package or the library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()  # may be called often: NVML counts
    except pynvml.NVMLError:
        return None
    return pynvml
