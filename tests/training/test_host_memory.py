"""The memory that is left, by files like those of the kernel."""

import pytest

from utils.training.host_memory import available_memory

GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path):
    """kernel({path: content}) -> a root with these files besides 8 GiB of memory."""

    def write(files: dict[str, str]):
        for name, content in [("proc/meminfo", f"MemAvailable: {8 << 20} kB\n"), *files.items()]:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


def test_the_system_tells(kernel):
    assert available_memory(kernel({})) == 8 * GIB
    assert 1 << 20 < available_memory() < 1 << 50


def test_no_files_at_all(tmp_path):
    """As on macOS: the memory of the machine."""
    assert 1 << 20 < available_memory(tmp_path) < 1 << 50


def test_groups_of_version_2(kernel):
    root = kernel({
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": f"{2 * GIB}\n",
    })  # fmt: skip
    assert available_memory(root) == 2 * GIB


def test_groups_of_version_1_in_a_container(kernel):
    """The path is that of the host; the group is the top one."""
    root = kernel({
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    })  # fmt: skip
    assert available_memory(root) == 2 * GIB


def test_no_limit_of_version_1(kernel):
    root = kernel({
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    })  # fmt: skip
    assert available_memory(root) == 8 * GIB


def test_a_group_that_is_full(kernel):
    root = kernel({
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}",
        "sys/fs/cgroup/memory.current": f"{GIB + 5}",
    })  # fmt: skip
    assert available_memory(root) == 0
