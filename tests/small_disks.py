"""A disk that is soon full, or cannot be written to."""

import contextlib
import resource
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size, options=""):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", folder]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("needs the right to mount a small tmpfs")
    except FileNotFoundError:
        pytest.skip("needs the command mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def full_disk(size: int):
    """The kernel writes files up to `size` bytes: the write that crosses it is cut short there,
    the next one fails, as when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
