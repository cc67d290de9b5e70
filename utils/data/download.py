"""Downloads that end as a complete, verified file or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import http.client
import io
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError, network_cause
from ..files import reason, sync_folder
from .progress import progress_bar

# What lies in a folder that data sets are downloaded into.
DATA_SETS = re.compile(
    r"\..*|cifar-.*|(Fashion)?MNIST|.*-ubyte(\.gz)?|.*_csv(\.tgz|\.tar\.gz)?|aclImdb.*|cache"
)
TIMEOUT_S = 30  # without a single byte
_BLOCK = 1 << 18
# Number of hexadecimal digits of a checksum -> its name and what computes it.
_ALGORITHMS: dict[int, tuple] = {
    32: ("MD5", functools.partial(hashlib.md5, usedforsecurity=False)),
    64: ("SHA-256", hashlib.sha256),
}


class _TransferError(Exception):
    """The network's part of a failed download; `str()` is the reason."""


def download(url: str, path: str | Path, checksum: str, *, hint: str) -> None:
    """Download `url` to `path`, which appears only once its checksum is right.

    `checksum` is a SHA-256 or an MD5, hexadecimal: the length tells which.

    The bytes arrive in `path` + ".part", which a kernel lock (it dies with its holder) guards
    against a second process; what a cut-off or killed download left there is continued. An
    existing `path` is left alone.

    Raises:
        UserError: in one line the reason and `hint`, which tells what the user can do instead.
    """
    algorithm, start_digest = _ALGORITHMS[len(checksum)]
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(partial) as file:
            if path.exists():  # another process has just finished it
                with contextlib.suppress(FileNotFoundError):
                    partial.unlink()
                return
            try:
                _transfer(url, file, path.name)
            finally:
                if os.fstat(file.fileno()).st_size == 0:
                    partial.unlink()
            file.seek(0)
            if hashlib.file_digest(file, start_digest).hexdigest() != checksum:
                partial.unlink()
                raise _TransferError(f"the {algorithm} of what arrived is not the expected one")
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
            sync_folder(path.parent)
    except _TransferError as error:
        raise UserError(f"cannot download {url}: {error}; {hint}") from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}; {hint}") from error


def refuse_strange_folder(folder: Path, dataset: str) -> None:
    """Raises UserError for a folder with anything but data sets that are downloaded: it may be the
    user's own data, which --dataset does not name."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if strange := [name for name in names if not DATA_SETS.fullmatch(name)]:
        raise UserError(
            f"{dataset} is not downloaded into {folder}, which holds other files ({strange[0]}): "
            "name another folder with --data_dir, or, if these are data of your own, what they are "
            "with --dataset (--help lists the kinds)"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[io.BufferedRandom]:
    """The file at `path`, made if need be, open for reading and appending, and ours alone."""
    while True:
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                print(f"waiting for another process that is writing {path}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it may have renamed or removed it while we waited.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    yield file
                    return


def _transfer(url: str, file: BinaryIO, name: str) -> None:
    """Append to `file` what it lacks of `url`; from the start if the server cannot continue."""
    response, start = _open(url, file.seek(0, os.SEEK_END))
    with response:
        if start == 0:
            file.truncate(0)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdecimal() else None
        size = f" ({total / 1e6:.0f} MB)" if total else ""
        done = start
        with progress_bar(
            True, f"downloading {url}{size}", desc=name, initial=start, total=total, unit="B",
            unit_scale=True,
        ) as bar:  # fmt: skip
            while block := _read(response):
                file.write(block)
                done += len(block)
                bar.update(len(block))
    file.flush()
    if total is not None and done < total:
        raise _TransferError(
            f"cut off after {done:,} of {total:,} bytes (the next run continues there)"
        )


def _open(url: str, start: int) -> tuple[http.client.HTTPResponse, int]:
    """The response and the offset at which its body begins: `start`, or 0 if that is refused."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return _open(url, 0)
        raise _TransferError(f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _TransferError(network_cause(error)) from error
    partial = response.status == http.HTTPStatus.PARTIAL_CONTENT
    if partial and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        response.close()
        raise _TransferError("the server sends another part of the file than was asked for")
    return response, start if partial else 0


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _TransferError(f"{network_cause(error)} (the next run continues there)") from error
