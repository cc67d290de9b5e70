"""What lies at a place that the user names: pictures or texts, and the flags that read them."""

import gzip
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..data.images.sources import IMAGE_DATASETS
from ..data.images.split_names import PICTURES, SPLITS, by_split, class_folder, is_ignored
from ..data.texts.files import KINDS
from ..data.texts.sources import TEXT_DATASETS
from ..errors import UserError
from ..files import reason
from ..plural import counted

# The user's own files, which the name alone does not find.
_OF_FILES = ("csv", "imagefolder", "parquet", "tar", "tfrecord")
_TABLES = tuple(f"{kind}{packed}" for kind in KINDS if kind != ".txt" for packed in ("", ".gz"))
_SHARDS = {".tar": "tar", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".parquet": "parquet"}
_PACKED = (".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
_SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_LOOK = 1 << 16  # bytes of a table
# The name of a picture at the end of a cell.
_PICTURE = re.compile(
    rb"(%s)[\"']?\s*([,;\t|}\]]|$)" % b"|".join(re.escape(end.encode()) for end in PICTURES), re.I
)


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        kind: "pictures" or "texts".
        flags: those of an entry that name the data.
        words: what it is, for the user.
    """

    kind: str
    flags: dict[str, str] = field(default_factory=dict)
    words: str = ""


def detect(place: str) -> Found:
    """Looks at names and at the beginning of tables alone. Raises UserError where nothing can be
    trained on, or it is not plain what is meant."""
    for kind, names in (("pictures", IMAGE_DATASETS), ("texts", TEXT_DATASETS)):
        if place in names and place not in _OF_FILES and not os.path.exists(place):
            return Found(kind, {"dataset": place}, f"the {kind} of {place}")
    path = Path(place)
    try:
        if path.is_dir():
            return _of_folder(path)
        if path.is_file():
            return _of_file(path)
    except OSError as error:
        raise UserError(f"{place}: {reason(error)}") from None
    named = sorted({*IMAGE_DATASETS, *TEXT_DATASETS} - {*_OF_FILES})
    raise UserError(
        f"{place}: there is no such folder or file; built-in and published data are "
        f"{', '.join(named)}"
    )


def _of_file(path: Path) -> Found:
    name = path.name.lower()
    if name.endswith(_TABLES):
        if _lists_pictures(path):
            return Found(
                "pictures", {"dataset": "csv", "data_dir": str(path)}, "a list of pictures"
            )
        return Found("texts", {"dataset": "csv", "train_file": str(path)}, "a table of texts")
    if name.endswith(_PACKED):
        raise UserError(f"{path}: unpack it, and name the folder")
    if name.endswith(_SHEETS):
        raise UserError(f"{path}: save it as CSV (UTF-8), and name that file")
    if path.suffix.lower() in _SHARDS:
        raise UserError(f"{path}: name the folder with the shards, {path.parent}")
    raise UserError(
        f"{path}: name a folder of pictures, or a table of texts or pictures ({', '.join(KINDS)})"
    )


def _of_folder(folder: Path) -> Found:
    inner = sorted(path for path in folder.iterdir() if not is_ignored(path.name))
    tables = [path for path in inner if path.name.lower().endswith(_TABLES)]
    train = [path for path in tables if _word(path) == "train"]
    if len(train) == 1:
        found, folders = _of_file(train[0]), class_folder(folder)
        if found.kind == "texts" and folders is not None:
            raise UserError(
                f"{folder} has both a table of texts, {train[0].name}, and folders of pictures, "
                f"such as {Path(folders).name}/: name the table, or move it away"
            )
        if found.kind == "pictures":
            return Found("pictures", {"dataset": "csv", "data_dir": str(folder)}, found.words)
        words = {_word(path): path.name for path in tables if _word(path) in SPLITS}
        others = {s: folder / words[w] for s, w in by_split(folder, words).items() if s != "train"}
        return Found(
            "texts",
            found.flags | {f"{split}_file": str(path) for split, path in others.items()},
            f"tables of texts ({', '.join(path.name for path in (*train, *others.values()))})",
        )
    if class_folder(folder) is not None or class_folder(folder / "train") is not None:
        beside = f" ({tables[0].name} beside them is not read)" if tables else ""
        flags = {"dataset": "imagefolder", "data_dir": str(folder)}
        return Found("pictures", flags, f"class folders{beside}")
    for path in (*inner, *(below for one in inner if one.is_dir() for below in one.iterdir())):
        if kind := _SHARDS.get(path.suffix.lower()):
            return Found("pictures", {"dataset": kind, "data_dir": str(folder)}, f"{kind} shards")
    if len(tables) == 1:
        return _of_file(*tables)
    if tables:
        names = ", ".join(path.name for path in tables[:5])
        raise UserError(f"{folder} has {counted(len(tables), 'table')}: name one of {names}")
    pictures = [path for path in inner if path.suffix.lower() in PICTURES]
    if pictures:
        raise UserError(
            f"{folder} has {counted(len(pictures), 'picture')} but no classes: put those of each "
            "class into a folder with its name"
        )
    raise UserError(
        f"{folder}: there are neither folders of pictures, one for each class, nor a table; it has "
        f"{', '.join(path.name for path in inner[:5]) or 'nothing'}"
    )


def _word(path: Path) -> str:
    """The name of a table without its endings, which may be the word of a split."""
    return path.name.lower().partition(".")[0]


def _lists_pictures(path: Path) -> bool:
    """Whether most rows at the beginning of a table name a picture."""
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        lines = file.read(_LOOK).replace(b"\0", b"").splitlines()  # of UTF-16
    rows = [line for line in lines[1:50] if line.strip()]
    return sum(_PICTURE.search(line) is not None for line in rows) * 2 > len(rows)
