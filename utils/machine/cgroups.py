"""Linux's control groups of this process, which limit the memory and CPU time of containers."""

from collections.abc import Iterator
from pathlib import Path


def cgroups_with(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of v2) of each cgroup of this process to which a controller, such as
    "memory", may apply, and of each of its ancestors. Folders may be missing; another system than
    Linux has none. `root`: of the file system whose /proc and /sys are read.
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
