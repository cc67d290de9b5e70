"""Available memory, by fake kernel files, and keep_freed_memory."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from utils.machine import host_memory
from utils.machine.host_memory import (
    available_memory,
    hand_back_freed_memory,
    keep_freed_memory,
    peak_rss,
)

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path):
    """kernel({path: content}) -> a root with these files and 8 GiB of available memory."""

    def write(files: dict[str, str]):
        for name, content in [("proc/meminfo", f"MemAvailable: {8 << 20} kB\n"), *files.items()]:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


def test_available_memory_of_the_system(kernel):
    assert available_memory(kernel({})) == 8 * GIB
    assert 1 << 20 < available_memory() < 1 << 50


def test_available_memory_without_kernel_files(tmp_path):
    """As on macOS: the machine's total memory."""
    assert 1 << 20 < available_memory(tmp_path) < 1 << 50


def test_a_limit_of_cgroups_v2(kernel):
    root = kernel({
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": f"{2 * GIB}\n",
    })  # fmt: skip
    assert available_memory(root) == 2 * GIB


@pytest.mark.parametrize("groups, place", [
    # In a container the path is the host's, and the cgroup is the top one.
    ("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n", ""),
    ("5:cpu,cpuacct:/job\n4:hugetlb,memory:/job\n", "job/"),
], ids=["in a container", "other controllers"])  # fmt: skip
def test_a_limit_of_cgroups_v1(kernel, groups, place):
    root = kernel({
        "proc/self/cgroup": groups,
        f"sys/fs/cgroup/memory/{place}memory.limit_in_bytes": f"{3 * GIB}",
        f"sys/fs/cgroup/memory/{place}memory.usage_in_bytes": f"{GIB}",
    })  # fmt: skip
    assert available_memory(root) == 2 * GIB


def test_no_limit_in_cgroups_v1(kernel):
    root = kernel({
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    })  # fmt: skip
    assert available_memory(root) == 8 * GIB


def test_a_full_cgroup_has_no_memory_available(kernel):
    root = kernel({
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}",
        "sys/fs/cgroup/memory.current": f"{GIB + 5}",
    })  # fmt: skip
    assert available_memory(root) == 0


def test_the_peak_of_this_process(monkeypatch):
    """From the kernel's file, or without it from getrusage."""
    block = bytearray(64 << 20)
    peak = peak_rss()
    assert len(block) < peak < 1 << 40
    monkeypatch.setattr(host_memory, "Path", lambda name: Path("/nowhere"))
    assert len(block) < peak_rss() < 1 << 40


# Allocates and frees 40 MB repeatedly. Prints whether keep_freed_memory took effect, and the page
# faults of ten allocations before and after it. 20 more come first, since glibc initially grows the
# heap: an aligned block does not fit into a hole of its own size.
SCRIPT = """
import resource
import torch
from utils.machine.host_memory import keep_freed_memory

def page_faults():
    for _ in range(20):
        torch.ones(10 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = page_faults()
print(keep_freed_memory(), usual, page_faults())
"""


def page_faults_of(**environment: str) -> tuple[bool, int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=clean | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept, before, after = done.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.slow
def test_freed_memory_is_kept():
    """Ten tensors in turn, each of 10,240 pages of 4 KiB; pages may be larger."""
    kept, usual, few = page_faults_of()
    assert kept and few < 100 <= usual  # with pages of 2 MiB: 200
    kept, _, faults = page_faults_of(MALLOC_MMAP_THRESHOLD_=str(2 << 20))
    assert not kept and faults >= 100


def test_the_users_settings_of_malloc_are_kept(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", None)  # must not be called
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1:glibc.malloc.trim_threshold=1000000")
    assert not keep_freed_memory()
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    assert not keep_freed_memory()


def test_nothing_is_changed_with_another_c_library(monkeypatch):
    monkeypatch.setattr(host_memory.sys, "platform", "linux")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
    hand_back_freed_memory()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_is_changed_on_another_system(monkeypatch, platform):
    monkeypatch.setattr(host_memory.sys, "platform", platform)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", None)  # must not be called
    for name in host_memory.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert not keep_freed_memory()
    hand_back_freed_memory()


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_ru_maxrss(monkeypatch, platform, unit):
    usage = host_memory.resource.struct_rusage((0.0, 0.0, 4096, *[0] * 13))
    monkeypatch.setattr(host_memory.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(host_memory, "Path", lambda name: Path("/nowhere"))
    monkeypatch.setattr(host_memory.sys, "platform", platform)
    assert peak_rss() == 4096 * unit
