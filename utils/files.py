"""Files that survive a kill: written aside, flushed to disk, renamed."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and flushes it to disk. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file in one moment: a reader, or the next start, sees the old one or the new."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def reason(error: OSError) -> str:
    """What went wrong, in words: "No space left on device"."""
    return error.strerror or str(error)
