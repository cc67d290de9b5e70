"""The memory of the machine: what a process can still take, and what becomes of what it frees."""

import ctypes
import os
import resource
import sys
from pathlib import Path

# Of the first version of control groups; the second one says "max".
NO_LIMIT = 1 << 60
# mallopt's parameters, by glibc's malloc.h, and what a user sets them by.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
CHOSEN = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
TUNABLES = ("glibc.malloc.mmap_", "glibc.malloc.trim_", "glibc.malloc.top_pad")


def keep_freed_memory() -> bool:
    """From here on the heap of this process, which its first thread uses, is never trimmed, and
    all tensors of that thread are in it: what is freed stays for those of the next step.

    By default glibc maps large tensors one by one and unmaps them when they are freed, and trims
    the heap, so that the same memory comes anew by page faults in every step (mallopt(3); its cost
    stands in benchmarks/results/host_memory.md). Nothing is done with another C library, or where
    the environment says what malloc is to do.

    Returns:
        whether it is done.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = [name for name in CHOSEN if name in os.environ]
    chosen += [name for name in TUNABLES if name in tunables]
    if chosen or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])


def hand_back_freed_memory() -> None:
    """Once, the pages that are free now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Bytes of resident memory that this process has had at most."""
    try:  # without those of the process that has started it
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def available_memory(root: Path = Path("/")) -> float:
    """Bytes that processes can still take: what the system has, or what the control groups (1 or
    2) of this process leave, if that is less. Infinity where the system does not tell.

    Args:
        root: of the file system whose /proc and /sys are read.
    """
    return min([_of_system(root), *_of_groups(root)])


def _of_system(root: Path) -> float:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return float("inf")


def _of_groups(root: Path) -> list[float]:
    """What each group that this process is in, and each above it, leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left = []
    for line in lines:  # number:controllers:/path; of version 2 there are no controllers
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Within a container the path is often that of the host: the group is then the top one.
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):
            left += _left(top.joinpath(*parts[:depth]), *names)
    return left


def _left(group: Path, limit_name: str, usage_name: str) -> list[float]:
    """[bytes] that a group leaves, or [] where it has no limit. What files of the disk are kept in
    memory unused does not count."""
    try:
        limit = int((group / limit_name).read_text())
        used = int((group / usage_name).read_text())
    except (OSError, ValueError):  # "max"
        return []
    if limit >= NO_LIMIT:
        return []
    try:
        pairs = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        statistics = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        statistics = {}
    files = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return [max(limit - used + files, 0)]
