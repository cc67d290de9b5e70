"""Arrays in .npy files, written so that a full disk is told as such."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a new file and flushes it to disk. Raises OSError, with its number: that of np.save
    has none."""
    with open(path, "wb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(array))
        file.flush()
        os.fsync(file.fileno())
