"""Files that are complete even after a kill: written aside, flushed to disk, renamed."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import UserError


def sync_folder(folder: Path) -> None:
    """Flushes renames and new names inside `folder` to disk, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file and flushes it to disk. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_files(folder: Path, files: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Writes (name, content) pairs as new files, likewise; returns their SHA-256 sums by name."""
    sums = {}
    for name, content in files:
        sums[name] = hashlib.sha256(content).hexdigest()
        write_synced(folder / name, content)
    return sums


def file_sum(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_text(sums: dict[str, str]) -> bytes:
    """{name: sum} in the format of `sha256sum -c`."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: readers see the old content or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends without an error.

    Raises UserError if the file cannot be written; nothing is left behind then.
    """
    path = Path(os.path.realpath(path))  # replaces the target of a link, not the link
    # Unique, as two processes may write at once. Libraries need the ending to tell the format.
    aside = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        if path.exists() and not path.is_file():  # a folder, a device, a pipe
            raise UserError(f"{path} exists and is not a file: choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


# What the user can mend, not a fault of the program.
DENIED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def denial(error: OSError) -> UserError | None:
    """The error for the user if a file's permissions or the length of its name have caused it."""
    if error.errno not in DENIED or error.filename is None:
        return None
    return UserError(f"{error.filename}: {reason(error)}")


def remedy(error: OSError, folder: Path) -> str:
    """What the user does about an error of writing into the folder, such as "make room"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {folder} writable"
    return "check the disk"


def reason(error: OSError) -> str:
    """The error in words, such as "No space left on device"."""
    return error.strerror or str(error)
