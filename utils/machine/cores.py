"""The CPU cores that this process may use."""

import os
from pathlib import Path

from .cgroups import cgroups_with


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
