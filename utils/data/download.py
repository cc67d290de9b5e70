"""Downloads that end as a complete, verified file or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError, network_cause
from ..files import written_aside
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


def download(url: str, path: str | Path, checksum: str, *, hint: str) -> None:
    """Download `url` to `path`, which appears only once its checksum is right.

    `checksum` is a SHA-256 or an MD5, hexadecimal: the length tells which.

    Raises:
        UserError: in one line the reason and `hint`, which tells what the user can do instead.
    """
    algorithm, start_digest = _ALGORITHMS[len(checksum)]
    try:
        with written_aside(path) as aside:
            _transfer(url, aside, Path(path).name)
            with open(aside, "rb") as file:
                found = hashlib.file_digest(file, start_digest).hexdigest()
            if found != checksum:
                raise _failed(url, f"the {algorithm} of what arrived is not the expected one")
    except UserError as error:
        raise UserError(f"{error}; {hint}") from error


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


def _transfer(url: str, path: Path, name: str) -> None:
    """Writes what `url` holds to `path`. Raises UserError, or OSError if it cannot be written."""
    with _network(url):
        response = urllib.request.urlopen(url, timeout=TIMEOUT_S)
    length = response.headers.get("Content-Length")
    total = int(length) if length and length.isdecimal() else None
    size = f" ({total / 1e6:.0f} MB)" if total else ""
    with (
        response,
        open(path, "wb") as file,
        progress_bar(
            True, f"downloading {url}{size}", desc=name, total=total, unit="B", unit_scale=True
        ) as bar,
    ):
        while block := _read(url, response):
            file.write(block)
            bar.update(len(block))
        if total is not None and file.tell() < total:
            raise _failed(url, f"cut off after {file.tell():,} of {total:,} bytes")


def _read(url: str, response: http.client.HTTPResponse) -> bytes:
    with _network(url):
        return response.read(_BLOCK)


@contextlib.contextmanager
def _network(url: str) -> Iterator[None]:
    """Raises UserError for what fails in the block."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _failed(url, f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failed(url, network_cause(error)) from error


def _failed(url: str, why: str) -> UserError:
    return UserError(f"cannot download {url}: {why}")
