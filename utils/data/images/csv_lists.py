"""Lists of picture files and their classes: `--dataset csv`.

    data_dir/train.csv   and test.csv or val.csv or both
    data_dir/train.csv   alone, or any list that `data_dir` itself names; a part is held out

valid.csv and validation.csv are other names of val.csv.
The lists beside a train.csv count, too, if `data_dir` names that file itself.

A list names its columns in its first line, in any order, beside others. Files are relative to the
list's folder. Classes are the sorted labels of the training pictures.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from utils.data.class_names import by_form, merged_note
from utils.data.images.imagenet import NoClasses, class_names, text_lines, told_apart
from utils.data.images.listing import Listing, load_listings
from utils.data.images.shards import CLASSES
from utils.data.images.sources import ImageData, NoTestSet
from utils.data.images.split_names import SPLITS, by_split
from utils.data.texts.files import Table, read_table
from utils.errors import UserError
from utils.files import reason
from utils.plural import counted

ENDINGS = (".csv", ".tsv")
# Names of columns, of which the first that is there is taken: "Image_Path" counts as "image path".
FILE_NAMES = (
    *("file", "file name", "filename", "file path", "filepath", "path", "image path"),
    *("image file", "image name", "image", "img path", "img", "picture", "image id"),
)
# Names of classes are preferred to their numbers.
LABEL_NAMES = (
    *("class name", "label name", "label text", "label", "labels", "class", "category", "target"),
    *("class id", "label id", "class index", "y"),
)


def load_csv(
    *, data_dir: Path, test_fraction: float | None = None, encoding: str | None = None, **settings
) -> ImageData:
    """The pictures of the lists, which are in `encoding` (see `decode` in utils/data/texts), loaded
    by `load_listings`. A test list without a column of labels, as of a competition, is left out if
    there is a val list.

    Raises:
        UserError: there is no list, a row of it is wrong, or see `load_listings`.
    """
    listings, classes, remark = {}, settings.pop("classes", None), ""
    lists = {"test": data_dir} if classes else _find_lists(data_dir, test_fraction)
    for split, path in lists.items():
        try:
            table = read_table(path, "picture", encoding)
            columns = _columns(table)
            listings[split], repeats = _read_list(table, columns, classes, once=split == "all")
        except NoClasses:
            if split != "test" or "val" not in listings:
                raise
            remark += f", without {path.name}, which has no labels"
            continue
        remark += f", {path.name} with {_told(table, columns)}"
        if repeats and split in ("all", "train"):
            what = "without" if split == "all" else "with"
            remark += f", {what} {counted(repeats, 'repeated line')} of {path.name}"
        classes = listings[split].classes
    folder = next(iter(lists.values())).parent
    data = load_listings("csv", folder, listings, test_fraction=test_fraction, **settings)
    notes = [note for listing in listings.values() for note in listing.notes]
    names, source = _names(folder, data.classes), data.source + remark
    return replace(data, classes=names, source=source, notes=[*notes, *data.notes])


def _find_lists(data_dir: Path, test_fraction: float | None) -> dict[str, Path]:
    """Split -> its list: {"train", "test" and/or "val"}, or {"all"}."""
    if not data_dir.exists():
        raise UserError(
            f"{data_dir} is not there: give the folder of the lists, or a list, with --data_dir"
        )
    found, folder = {}, data_dir
    if not data_dir.is_dir():
        found, folder = {"train": data_dir}, data_dir.parent
    if not found or data_dir.stem == "train":
        lists: dict[str, Path] = {}  # by the words of splits
        for word, ending in itertools.product(SPLITS, ENDINGS):
            if (path := folder / f"{word}{ending}").is_file():
                lists.setdefault(word, path)
        words = by_split(folder, {word: path.name for word, path in lists.items()})
        found = {split: lists[word] for split, word in words.items()} | found
    if "train" not in found:
        raise UserError(
            f"{data_dir} has no train.csv: give the folder of the lists with --data_dir, or a "
            "list itself"
        )
    held_out = [split for split in ("val", "test") if split in found]
    if held_out and test_fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on {data_dir}, which has {found[held_out[-1]].name}: "
            "leave it out"
        )
    if not held_out and test_fraction is None:
        raise NoTestSet(f"{found['train']} comes without a test set: add --test_fraction 0.2")
    if not held_out:
        return {"all": found["train"]}
    return {split: found[split] for split in ("train", *held_out)}


def _read_list(
    table: Table, columns: tuple[int, int, bool], classes: list[str] | None, once: bool
) -> tuple[Listing, int]:
    """The files of a list, and how many of its lines repeat an earlier one.

    Args:
        columns: as returned by `_columns`.
        classes: those of the training pictures; None: the list has them.
        once: leave out repeats, as one could get into the training split and one into the test
            split.
    """
    path = table.path
    names, labels, lines = _rows(table, columns, set(classes or ()))
    forms = by_form(classes or set(labels))
    notes = merged_note(set(labels), forms.values())
    labels = [forms[normalize("NFC", label)] for label in labels]
    if classes is None:
        numbers = all(label.isascii() and label.isdecimal() for label in labels)
        classes = sorted(set(labels), key=int if numbers else None)
    repeats = _repeats(path, names, labels, lines)
    if once and repeats:
        names, labels = (
            [cell for row, cell in enumerate(column) if row not in repeats]
            for column in (names, labels)
        )
    folder = str(path.parent)
    stats = [_state(os.path.join(folder, name)) for name in names]
    if all(size < 0 for size, _ in stats):
        remedy = f"their names must be relative to {path.parent}"
        if "\\" in names[0]:
            remedy = "write / instead of \\ between folders and files"
        raise UserError(f"{path} lists {names[0]} and others, none of which is there: {remedy}")
    number = {label: i for i, label in enumerate(classes)}
    listing = Listing(
        path.parent, classes, names, [number[label] for label in labels], stats, [], notes
    )
    return listing, len(repeats)


def _rows(
    table: Table, columns: tuple[int, int, bool], known: set[str]
) -> tuple[list[str], list[str], list[int]]:
    """(files, labels, numbers of the lines) of a list. Labels must be `known`, unless that is
    empty."""
    path, known = table.path, {normalize("NFC", name) for name in known}
    file_column, label_column, header = columns
    names, labels, lines, others = [], [], [], {}
    for row in table.rows[header:]:
        if row.problem is not None:
            raise UserError(f"{path}, line {row.line} {row.problem}: correct the line")
        name, label = ((row.cells[j] or "").strip() for j in (file_column, label_column))
        if not name or not label:
            what = "label" if name else "file"
            raise UserError(f"{path}, line {row.line} has no {what}: fill it in, or remove it")
        if known and normalize("NFC", label) not in known:
            others.setdefault(label, row.line)
        names.append(name)
        labels.append(label)
        lines.append(row.line)
    if others:
        some = ", ".join(f"{label!r} in line {line}" for label, line in [*others.items()][:5])
        count = counted(len(others), "label")
        raise UserError(f"{path} has {count} that the training pictures do not have: {some}")
    if not names:
        raise UserError(f"{path} lists no pictures: give a file with a row for each picture")
    return names, labels, lines


def _repeats(path: Path, names: list[str], labels: list[str], lines: list[int]) -> set[int]:
    """The rows whose file an earlier one has, too. Raises UserError if their labels differ."""
    folder, first = str(path.parent), {}
    repeats = set()
    for row, (name, label) in enumerate(zip(names, labels, strict=True)):
        before = first.setdefault(os.path.normpath(os.path.join(folder, name)), row)
        if label != labels[before]:
            raise UserError(
                f"{path}, lines {lines[before]} and {lines[row]} give {name} the labels "
                f"{labels[before]!r} and {label!r}: remove one of the lines"
            )
        if before != row:
            repeats.add(row)
    return repeats


def _columns(table: Table) -> tuple[int, int, bool]:
    """The columns of the file and of the label, counted from 0, and whether a header names them."""
    first = table.rows[0].cells
    names = table.names or [cell or "" for cell in first]
    plain = [" ".join(name.lower().replace("_", " ").split()) for name in names]
    file, label = (
        next((plain.index(name) for name in known if name in plain), None)
        for known in (FILE_NAMES, LABEL_NAMES)
    )
    if file is not None and label is not None:
        return file, label, table.names is None
    if len(first) == 2:  # perhaps without a header
        for column, cell in enumerate(first):
            if cell and os.path.isfile(table.path.parent / cell.strip()):
                return column, 1 - column, False
    if file is not None:
        raise NoClasses(
            f"{table.path} has the columns {', '.join(names)[:200]}: name that of the pictures' "
            "classes 'label', in the first line, or move the list away if it has none"
        )
    raise UserError(
        f"{table.path} has the columns {', '.join(names)[:200]}: name that of the pictures' files "
        "'file' and that of their classes 'label', in the first line"
    )


def _told(table: Table, columns: tuple[int, int, bool]) -> str:
    """Which columns are taken, for messages."""
    file, label, header = columns
    names = table.names or (table.rows[0].cells if header else None)
    where = [str(j + 1) if names is None else f"{j + 1} ({names[j]})" for j in (file, label)]
    return f"files in column {where[0]} and classes in {where[1]}{table.remark}"


def _state(path: str) -> tuple[int, int]:
    """(bytes, time of modification in ns); (-1, 0) if it is not there, a bad file then."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return -1, 0
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = reason(error) if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path!r}: {why}") from error
    return found.st_size, found.st_mtime_ns


def _names(folder: Path, labels: list[str]) -> list[str]:
    """Names of the classes: numbers are lines of classes.txt, synsets those of their file."""
    lines = [line.strip() for line in text_lines(folder / CLASSES)]
    if all(label.isdecimal() and int(label) < len(lines) for label in labels):
        return told_apart({label: lines[int(label)] for label in labels})
    return class_names(folder, labels)
