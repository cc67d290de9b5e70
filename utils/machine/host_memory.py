"""Host memory: how much is available, and whether the C library keeps or returns freed memory.

`root` is that of the file system whose /proc and /sys are read.
"""

import ctypes
import os
import resource
import sys
from pathlib import Path

from .cgroups import cgroups_with

# Limits from here on mean "no limit" in cgroup v1; v2 says "max".
NO_LIMIT = 1 << 60
# mallopt's parameters from glibc's malloc.h, and the environment variables that set them.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)
TUNABLES = ("glibc.malloc.mmap_", "glibc.malloc.trim_", "glibc.malloc.top_pad")


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for reuse: the main thread's tensors are all allocated from the
    heap, and the heap is never trimmed.

    By default glibc maps each large tensor, unmaps it when it is freed, and trims the heap, so that
    every step gets the same memory again through page faults (mallopt(3); the cost is in
    benchmarks/results/host_memory.md). Does nothing with another C library, or if the environment
    already configures malloc.

    Returns:
        whether it took effect.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    configured = [name for name in VARIABLES if name in os.environ]
    configured += [name for name in TUNABLES if name in tunables]
    if configured or sys.platform != "linux":
        return False
    return _mallopt(0, -1)


def free_memory_as_usual() -> None:
    """Where `keep_freed_memory` took effect: glibc's defaults again."""
    _mallopt(65536, 128 << 10)
    hand_back_freed_memory()


def _mallopt(mmap_max: int, trim_threshold: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, mmap_max), mallopt(M_TRIM_THRESHOLD, trim_threshold)])


def hand_back_freed_memory() -> None:
    """Returns the currently free heap pages to the system, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Peak resident memory of this process in bytes."""
    try:  # VmHWM, unlike ru_maxrss, excludes the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def available_memory(root: Path = Path("/")) -> float:
    """Bytes that can still be allocated: available on the system, or within the limits of this
    process's cgroups (v1 or v2), whichever is less. Infinity if the system does not report it.
    """
    return min([_system_available(root), *_groups_available(root)])


def _system_available(root: Path) -> float:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return float("inf")


def _groups_available(root: Path) -> list[float]:
    """Bytes available in each cgroup of this process and in each ancestor that has a limit."""
    v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    available = []
    for group, is_v2 in cgroups_with("memory", root):
        available += _group_available(group, *(v2 if is_v2 else v1))
    return available


def _group_available(group: Path, limit_name: str, usage_name: str) -> list[float]:
    """[available bytes] of a cgroup, or [] if it has no limit. Inactive page cache counts as
    available."""
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
    page_cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return [max(limit - used + page_cache, 0)]
