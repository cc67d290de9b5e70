"""How a search divides the machine among the trials that run at once."""

from __future__ import annotations

import os

from utils.machine.cores import usable_cores
from utils.settings.config import Config

# Most trials at once without a GPU, unless --jobs says otherwise.
MOST_JOBS = 4
# Devices of NVIDIA's driver, Windows and AMD's driver.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def machine(jobs: int | None, base: Config) -> tuple[int, int, list[str]]:
    """(trials at once, CPU threads of each, CUDA_VISIBLE_DEVICES of each GPU or [])."""
    cores = usable_cores()
    devices = []
    # PyTorch takes seconds to import, so only if there may be a GPU.
    if base.device != "cpu" and any(map(os.path.exists, DRIVERS)):
        import torch

        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [str(n) for n in range(count)] if not visible else visible.split(",")[:count]
    jobs = jobs or (len(devices) if devices else min(cores, MOST_JOBS))
    threads = base.threads or max(1, cores // jobs)
    return jobs, threads, devices
