"""What NVIDIA's management library (NVML) says of a GPU: use, power, memory, driver, links.

The package nvidia-ml-py, imported as pynvml, is optional. Its calls ask the driver and put nothing
on a CUDA stream, so that they do not wait for the GPU's work.
"""

import contextlib
import re
from pathlib import Path

MEGA = 1_000_000
# Bytes per second and lane, in one direction, by generation of PCI Express, after its encoding.
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


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

    def nvlink(self) -> float:
        """Bytes per second of all its active NVLinks together, in one direction; 0: none."""
        nvml, links = self._nvml, len(self._active_links())
        if not links:
            return 0.0
        with contextlib.suppress(nvml.NVMLError):
            field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON  # megabytes per second of a link
            (speed,) = nvml.nvmlDeviceGetFieldValues(self._handle, [field])
            if speed.nvmlReturn == 0:
                return float(links * speed.value.uiVal * MEGA)
        return 0.0

    def nvlink_gpus(self) -> int | None:
        """How many other GPUs its NVLinks lead to; None: to all, by a switch, or unknown."""
        nvml, found = self._nvml, set()
        try:
            for link in self._active_links():
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(self._handle, link)
                if kind != nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                    return None
                found.add(nvml.nvmlDeviceGetNvLinkRemotePciInfo(self._handle, link).busId)
        except nvml.NVMLError:
            return None
        return len(found)

    def _active_links(self) -> list[int]:
        nvml, active = self._nvml, []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(nvml.NVMLError):
                if nvml.nvmlDeviceGetNvLinkState(self._handle, link) == 1:
                    active.append(link)
        return active

    def pcie(self) -> float:
        """Bytes per second of its PCI Express link in one direction; 0: unknown."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(self._handle)
            lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(self._handle)
            return PCIE_LANE.get(generation, 0.0) * lanes
        return 0.0


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
