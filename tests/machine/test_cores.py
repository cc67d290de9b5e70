"""How many CPU cores this process can use, by fake kernel files."""

import os

import pytest

from utils.machine.cores import usable_cores


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """kernel({path: content}) -> a root with these files, on a machine of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)

    def write(files: dict[str, str]):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


def test_those_that_this_process_may_run_on(tmp_path, monkeypatch):
    """All, if the system does not say which."""
    assert 1 <= usable_cores() <= os.cpu_count()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert usable_cores(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(("quota", "cores"), [
    ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64),
    ("9900000 100000", 64),
])  # fmt: skip
def test_a_quota_of_cgroups_v2(kernel, quota, cores):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"}
    assert usable_cores(kernel(files)) == cores


@pytest.mark.parametrize(("outer", "inner"), [("400000", "max"), ("max", "400000"),
                                              ("400000", "800000")])  # fmt: skip
def test_the_least_quota_of_a_cgroup_and_its_ancestors(kernel, outer, inner):
    root = kernel({
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/cpu.max": f"{outer} 100000\n",
        "sys/fs/cgroup/pod/container/cpu.max": f"{inner} 100000\n",
    })  # fmt: skip
    assert usable_cores(root) == 4


@pytest.mark.parametrize(("groups", "place"), [
    # In a container the path is the host's, and the cgroup is the top one.
    ("4:memory:/docker/abc\n3:cpuacct,cpu:/docker/abc\n0::/\n", ""),
    ("5:cpu:/job\n4:cpuset:/other\n", "job/"),
], ids=["in a container", "other controllers"])  # fmt: skip
@pytest.mark.parametrize(("quota", "cores"), [("250000", 5), ("-1", 64)])
def test_a_quota_of_cgroups_v1(kernel, groups, place, quota, cores):
    root = kernel({
        "proc/self/cgroup": groups,
        f"sys/fs/cgroup/cpu/{place}cpu.cfs_quota_us": f"{quota}\n",
        f"sys/fs/cgroup/cpu/{place}cpu.cfs_period_us": "50000\n",
    })  # fmt: skip
    assert usable_cores(root) == cores
