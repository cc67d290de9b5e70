"""A disk that is soon full, or cannot be written."""

import contextlib
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
        subprocess.run(["umount", folder], check=True)
