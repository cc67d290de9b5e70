"""What torchrun tells a process about its place among the others."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchedAs:
    rank: int
    local_rank: int  # among the processes of this machine
    world_size: int
    restarts: int  # of this process's place so far


def launched() -> LaunchedAs | None:
    """None where torchrun has not started this process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(os.environ.get(name, "").isdecimal() for name in (*names, "MASTER_PORT")):
        return None
    values = [int(os.environ[name]) for name in names]
    return LaunchedAs(*values, restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
