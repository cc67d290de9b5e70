"""What a rank says of itself: host, device, versions, network."""

import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from ..launch.hosts import SECRET
from ..launch.network import interface_of, local_address
from ..machine.cores import usable_cores
from ..machine.host_memory import available_memory
from ..machine.nvml import driver_version, open_gpu
from ..place import ROOT

# Variables that decide how ranks communicate, or which devices they see.
PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "UCX_", "FI_", "TORCH_", "SLURM_JOB", "SLURM_STEP")
VARIABLES = ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "MASTER_ADDR", "MASTER_PORT")


def facts_of(device: torch.device, rank: int, threads: int, together: bool) -> dict:
    """For JSON. `together`: this process is one of several, so that the network matters."""
    facts = {
        "rank": rank,
        "host": socket.gethostname(),
        "device": device_facts(device),
        "cores": usable_cores(),
        "threads": threads,
        "memory_available_bytes": available_memory(),
        "driver": driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "kernel": platform.platform(),
        "code": code_digest(ROOT),
        "environment": environment(os.environ),
    }
    return facts | ({"network": network_facts(os.environ)} if together else {})


def device_facts(device: torch.device) -> dict:
    if device.type != "cuda":
        return {"type": device.type, "name": _cpu_name()}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    gpu = open_gpu(str(properties.uuid))
    return {
        "type": "cuda",
        "name": properties.name,
        "index": device.index,
        "uuid": str(properties.uuid),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": total,
        "memory_free_bytes": free,
        "figures": gpu.read() if gpu else None,
    }


def unusable_gpu(visible: str | None, root: Path = Path("/")) -> str | None:
    """Why PyTorch cannot use the NVIDIA GPU of this machine, and what to do. None if it can, or if
    there is no such GPU.

    Args:
        visible: the environment variable CUDA_VISIBLE_DEVICES.
        root: of the file system whose /sys and /proc are read.
    """
    if torch.cuda.is_available():
        return None
    driver = driver_version(root / "proc/driver/nvidia/version")
    if not driver and not _on_the_bus(root):
        return None
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides it: unset it"
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) was built without CUDA: pytorch.org names others"
        )
    if not driver:
        return "there is no NVIDIA driver: install it; in a container, start it with access to GPUs"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
    else:
        reason = "PyTorch counts no GPU"
    return (
        f"driver {driver}, PyTorch for CUDA {torch.version.cuda}: {reason}; does nvidia-smi work?"
    )


def _on_the_bus(root: Path) -> bool:
    """Whether a PCI device is a GPU of NVIDIA: a display controller of vendor 10de."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / n).read_text().strip() for n in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def network_facts(environ: Mapping[str, str]) -> dict:
    """The interface that gloo uses, by the environment or the route to rank 0."""
    host, port = environ.get("MASTER_ADDR", "localhost"), int(environ.get("MASTER_PORT", 0))
    address = local_address(host, port)
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    name = chosen or interface_of(address) or "unknown"
    return {
        "interface": name,
        "chosen_by": "GLOO_SOCKET_IFNAME" if chosen else "the route to rank 0",
        "address": address,
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter; no keys or tokens."""
    names = [n for n in environ if n.startswith(PREFIXES) or n in VARIABLES]
    return {n: environ[n] for n in sorted(names) if not any(word in n for word in SECRET)}


def code_digest(root: Path) -> str:
    """Of the project's Python files, the same for the same code."""
    digest = hashlib.sha256()
    patterns = "*.py", "entries/*.py", "utils/**/*.py"
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a build without NCCL
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
