"""Tar shards of encoded pictures, as webdataset has them.

Members with the same path up to the first dot of its last part belong together: KEY.jpg is a
picture, KEY.cls its label in digits; or KEY.json has the label under one of LABEL_KEYS. Members are
read where they lie and never unpacked.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from ...errors import UserError
from ...files import reason
from .decode import raise_transient, why
from .file_formats import picture_endings, unread_formats
from .records import RECORD, File
from .scanning import Bad, Scanned, entry

# Of several pictures in a sample, the first of these is taken.
PICTURES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "bmp", "gif", "tif", "tiff")
LABELS = ("cls", "json")
LABEL_KEYS = ("cls", "label", "class")
MOST_LABEL = 1 << 20  # bytes of a member with a label


@dataclass(frozen=True)
class TarShard:
    """A tar file."""

    files: list[File]  # a single one
    labels = None

    def sample(self, path: str, key: str) -> str:
        """A sample, for messages."""
        return f"{path}, member {key!r}"

    def scan(self, root: str, thorough: bool) -> Scanned:
        path = os.path.join(root, self.files[0].path)
        table, bad = [], []
        try:
            with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
                for key, members in _samples(archive, file, path):
                    picture = _picture(members)
                    if picture is None:
                        problems = _problems(archive, members)
                        bad += [Bad(self.sample(path, key), problem) for problem in problems]
                        continue
                    try:
                        label = _label(archive, members)
                        start, length = picture.offset_data, picture.size
                        # Reads no more than headers need.
                        section = cast(BinaryIO, archive.extractfile(picture))
                        table.append((0, start, length, label, *entry(section, length, thorough)))
                    except Exception as error:  # Pillow may raise any
                        raise_transient(self.sample(path, key), error)
                        bad.append(Bad(self.sample(path, key), why(error)))
        except tarfile.TarError as error:
            raise UserError(f"{path} is not a whole tar file ({error}): fetch it again") from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        return Scanned(np.array(table, RECORD), bad)


@contextlib.contextmanager
def new_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """An archive for `add_sample`, which is flushed to disk at the end."""
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            yield archive
        file.flush()
        os.fsync(file.fileno())


def add_sample(
    archive: tarfile.TarFile, number: int, ending: str, picture: bytes, label: int | None
) -> None:
    """Adds a picture and its label; without one it is a bad sample."""
    for name, part in ((ending, picture), ("cls", b"" if label is None else str(label).encode())):
        member = tarfile.TarInfo(f"{number:09}.{name}")
        member.size = len(part)
        archive.addfile(member, io.BytesIO(part))


def _samples(archive: tarfile.TarFile, file: BinaryIO, path: str):
    """(key, {ending: member}) of each sample."""
    size = os.fstat(file.fileno()).st_size
    key, members = None, {}
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it keeps all that it has read
        if not member.isreg() or member.issparse():
            continue
        if member.offset_data + member.size > size:
            raise UserError(f"{path} was cut short in {member.name!r}: fetch the file again")
        folder, base = posixpath.split(member.name)
        stem, _, ending = base.partition(".")
        if not stem:  # hidden, such as the ._0.jpg that macOS adds to each 0.jpg
            continue
        if (new := posixpath.join(folder, stem)) != key:
            if members:
                yield key, members
            key, members = new, {}
        members[ending.lower()] = member
    # It ends with an empty block; a damaged header looks like an end to `next`, too.
    end = os.pread(file.fileno(), tarfile.BLOCKSIZE, archive.offset)
    if len(end) < tarfile.BLOCKSIZE:
        raise UserError(f"{path} was cut short: fetch the file again")
    if any(end):
        raise UserError(f"{path} is damaged at byte {archive.offset}: fetch the file again")
    if members:
        yield key, members


def _picture(members: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """A sample's picture, if it has one."""
    rarer = (kind for kind in members if f".{kind}" in picture_endings())
    return next((members[kind] for kind in (*PICTURES, *rarer) if kind in members), None)


def _problems(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> list[str]:
    """What is wrong with a sample that has no picture. Nothing: it belongs to the shard, or is of
    another kind. Pictures with dots in their names may look like a single sample."""
    endings = [kind for kind in members if posixpath.splitext(kind)[1] in picture_endings()]
    if endings:
        return [
            f"its name has a dot before the ending (.{ending}): rename it" for ending in endings
        ]
    with contextlib.suppress(ValueError, RecursionError):
        _label(archive, members)
        unread = unread_formats(f"x.{kind}" for kind in members)
        return [": ".join(["it has no picture of a known format", *unread])]
    return []


def _label(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> int:
    kind = next((kind for kind in LABELS if kind in members), None)
    if kind is None:
        raise ValueError("it has no .cls and no .json with its label")
    if members[kind].size > MOST_LABEL:
        raise ValueError(f"its .{kind} is too large")
    text = archive.extractfile(members[kind]).read()
    value = text.strip()
    if kind == "json":
        content = json.loads(text)
        found = content if isinstance(content, dict) else {}
        value = next((found[key] for key in LABEL_KEYS if key in found), None)
    with contextlib.suppress(TypeError, ValueError):
        if 0 <= (label := int(value)) < 1 << 31:
            return label
    raise ValueError("it has no label, which is a whole number from 0 on")
