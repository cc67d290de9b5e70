"""The CPU cores that this process may use, and Linux's control groups, which limit its CPU time and
memory in a container.

`root` is that of the file system whose /proc and /sys are read.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def allowed_cores() -> int:
    """CPU cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process can keep busy: `allowed_cores`, or fewer if its cgroups (v1 or
    v2) have a quota of CPU time, as with `docker run --cpus 2`. More threads would be stopped until
    the next period once they have used it up.
    """
    return min([allowed_cores(), *_quotas(root)])


def _quotas(root: Path) -> list[int]:
    """The quota of each cgroup of this process and of each ancestor that has one, in cores, rounded
    up."""
    quotas = []
    for group, v2 in cgroups_with("cpu", root):
        names = ["cpu.max"] if v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        try:
            text = " ".join((group / name).read_text() for name in names)
            quota, period = map(int, text.split())  # microseconds; -1 in v1: no quota
        except (OSError, ValueError):  # "max": no quota in v2
            continue
        if quota > 0 and period > 0:
            quotas.append(-(-quota // period))
    return quotas


def cgroups_with(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of v2) of each cgroup of this process to which a controller, such as
    "memory", may apply, and of each of its ancestors. Folders may be missing; another system than
    Linux has none.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:  # number:controllers:/path; controllers is empty for v2
        _, controllers, path = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("" if v2 else controller)
        # In a container the path is often the host's, and the process's cgroup is the top one.
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):
            yield top.joinpath(*parts[:depth]), v2
