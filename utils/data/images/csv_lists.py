"""Lists of picture files and their classes: `--dataset csv`.

    data_dir/train.csv   and test.csv or val.csv or both
    data_dir/train.csv   alone, or any list that `data_dir` itself names; a part is held out

valid.csv and validation.csv are other names of val.csv. A test.csv without classes is left out.
The lists beside a train.csv count, too, if `data_dir` names that file itself.

A list names its columns in its first line, in any order, beside others. Files are relative to the
list's folder, or looked for in it (`_Pictures`). Classes are the sorted labels of the training
pictures.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from unicodedata import normalize

from ...errors import Faults, UserError
from ...files import reason
from ...plural import counted
from ..class_names import by_form, merged_note
from ..texts.columns import find_column, find_group_column
from ..texts.files import Table, read_table
from .file_formats import picture_endings
from .image_data import ImageData, PictureRequest
from .imagenet import NoClasses, class_names, text_lines, told_apart
from .listing import Listing, check_test_fraction, load_listings
from .records import File
from .shards import CLASSES
from .split_names import ENDINGS, SPLITS, by_split, first_word, is_ignored

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


def load_csv(name: str, request: PictureRequest) -> ImageData:
    """The pictures of the lists, which are in `encoding` (see `decode` in utils/data/texts), loaded
    by `load_listings`. A test list without classes, as of a competition, is left out.

    Raises:
        UserError: there is no list, a row of it is wrong, or see `load_listings`.
    """
    data_dir, test_fraction, classes = request.data_dir, request.test_fraction, request.classes
    label_column = request.label_column
    lists = {"test": data_dir} if classes else _find_lists(data_dir)
    if "train" in lists and "test" not in lists:  # else it counts if it has classes
        check_test_fraction(data_dir, [lists[s].name for s in lists if s != "train"], test_fraction)
    listings, firsts, remark, faults = {}, {}, "", Faults()
    for split, path in lists.items():
        table = read_table(path, "picture", request.encoding)
        pictures = _Pictures(path, request.image_dir)
        try:
            columns = _columns(table, pictures, request.image_column, label_column, not listings)
        except NoClasses as unlabelled:
            if split != "test" or not listings:
                raise
            listings["train"].notes.append(f"{path.name} {unlabelled.note}")
            continue
        remark += f", {path.name} with {_told(table, columns)}"
        named = table.names or (_first(table) if columns[2] else [])
        group = find_group_column(table, named, request.group_column, required=not listings)
        if "train" not in lists:  # a trained model has the names of its classes, not their numbers
            _name_labels(table, columns)
        with faults:
            listings[split], firsts[split] = _read_list(
                table, pictures, columns, classes, request.on_bad, faults, group
            )
        classes = next(iter(listings.values())).classes if listings else None
        if not classes:
            break
        if named:
            label_column = named[columns[1]]  # it may be in another place in the others
    faults.tell()
    folder = next(iter(lists.values())).parent
    if train := listings.get("train"):
        rows = firsts["train"]
        held_out = [lists[split].name for split in listings if split != "train"]
        check_test_fraction(data_dir, held_out, test_fraction)
        if repeats := len(train.files) - len(rows):
            what = "with" if held_out else "without"
            remark += f", {what} {counted(repeats, 'repeated line')} of {lists['train'].name}"
        if not held_out:  # no picture is trained on and tested
            files = [train.files[row] for row in rows]
            labels = [train.labels[row] for row in rows]
            groups = train.groups and [train.groups[row] for row in rows]
            listings = {"all": replace(train, files=files, labels=labels, groups=groups)}
    data = load_listings(name, listings, replace(request, data_dir=folder))
    names = _names(folder, data.classes)
    return replace(data, classes=names, source=data.source + remark)


def listed_pictures(
    path: Path, on_bad: str, image_column: str | None, image_dir: str | None,
    encoding: str | None, note: Callable[[str], None],
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The names in a list for --predict, one for each row, and their paths; "" is the name in a row
    that cannot be used. See `load_csv` and `_Pictures.take`."""
    table, pictures = read_table(path, "picture", encoding), _Pictures(path, image_dir)
    file, header = _file_column(table, pictures, image_column)
    rows = table.rows[header:]
    names = ["" if row.problem else (row.cells[file] or "").strip() for row in rows]
    files = pictures.take(names, [row.line for row in rows], on_bad, note)
    return names, [os.path.join(path.parent, file.path) for file in files]


def _find_lists(data_dir: Path) -> dict[str, Path]:
    """Split -> its list, in the order train, val, test."""
    if not data_dir.exists():
        raise UserError(
            f"{data_dir} is not there: give the folder of the lists, or a list, with --data_dir"
        )
    found, folder = {}, data_dir
    if not data_dir.is_dir():
        found, folder = {"train": data_dir}, data_dir.parent
    if not found or data_dir.stem == "train":
        both = itertools.product(reversed(ENDINGS), SPLITS)
        lists = {word: path for e, word in both if (path := folder / f"{word}{e}").is_file()}
        words = by_split(folder, {word: path.name for word, path in lists.items()})
        found = {split: lists[word] for split, word in words.items()} | found
    if "train" not in found:
        raise UserError(
            f"{data_dir} has no train.csv: give the folder of the lists with --data_dir, or a "
            "list itself"
        )
    return {split: found[split] for split in ("train", "val", "test") if split in found}


class _Pictures:
    """Finds the pictures of the list `path`, in `image_dir`, relative to its folder, or None.

    Names may lack their ending. If none is where the list says, what ends as they do is looked for
    in the list's folder, and in folders in it that are not another split's by their names.
    """

    def __init__(self, path: Path, image_dir: str | None):
        self.path, self.root, self.folder = path, str(path.parent), image_dir or ""
        self.pictures_in = cache(self._pictures_in)
        if not os.path.isdir(os.path.join(self.root, self.folder)):
            raise UserError(f"--image_dir {image_dir}: there is no such folder in {self.root}")

    @cached_property
    def places(self) -> list[str]:
        """The folders to look in, relative to that of the list."""
        if self.folder:
            return [self.folder]
        with os.scandir(self.root) as scan:
            folders = (entry.name for entry in scan if entry.is_dir())
            inner = sorted(name for name in folders if not is_ignored(name))
        if split := SPLITS.get(first_word(self.path.stem) or ""):
            inner = [name for name in inner if SPLITS.get(first_word(name) or "", split) == split]
        return ["", *inner, *(f"{name}/{name}" for name in inner)]  # as archives are unpacked

    def _pictures_in(self, inner: str, anywhere: bool) -> dict[str, list[str]]:
        """Names, also without ending or in lower case, of the pictures in the folders `inner` of
        `places` -> their paths."""
        found: dict[str, list[str]] = {}
        for place in self.places if anywhere else [self.folder]:
            folder = os.path.join(place, inner)
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(os.path.join(self.root, folder))):
                    stem, ending = os.path.splitext(name)
                    if ending.lower() in picture_endings():
                        for key in {name, stem, normalize("NFC", name).lower()}:
                            found.setdefault(key, []).append(os.path.join(folder, name))
        return found

    def find(self, name: str, anywhere: bool = True) -> list[str]:
        """The paths that a name may stand for."""
        if os.path.isfile(os.path.join(self.root, self.folder, name)):
            return [os.path.join(self.folder, name)]
        *parts, last = name.replace("\\", "/").split("/")
        parts = [part for part in parts if part not in ("", ".", "..")]
        for start in range(len(parts) + 1 if anywhere else 1):
            known = self.pictures_in("/".join(parts[start:]), anywhere)
            if found := known.get(last) or known.get(normalize("NFC", last).lower()):
                return found
        return []

    def take(
        self, names: list[str], lines: list[int], on_bad: str, note: Callable[[str], None]
    ) -> list[File]:
        """The pictures in `lines` of the list; `note` is given lines for the user. Raises UserError
        if one is missing and `on_bad` is "error", or if all are."""
        files = [self._file(os.path.join(self.folder, name)) for name in names]
        missing = [row for row, name in enumerate(names) if files[row].size < 0 or not name]
        still, example = [], ""
        for row in missing:
            found = self.find(names[row], len(missing) == len(names))
            where = f"{self.path}, line {lines[row]}: {names[row]}"
            if len(found) > 1:
                raise UserError(
                    f"{where} may be {found[0]} or {found[1]}: name their folder with --image_dir, "
                    "or write the endings into the list"
                )
            if not found:
                still.append(row)
                continue
            example = example or f"{where} is taken for {found[0]}, and so on"
            files[row] = self._file(found[0])
        if example:
            note(example)
        if still:
            what = f"{len(still):,} of {counted(len(names), 'picture')} of {self.path} are not "
            what += f"there, such as {names[still[0]]!r} in line {lines[still[0]]}"
            if len(still) == len(names):
                raise UserError(f"{what}: name the folder with --image_dir")
            if on_bad == "error":
                raise UserError(f"{what}: add them, or leave them out with --on_bad skip")
            note(what)
        return files

    def _file(self, path: str) -> File:
        try:
            return File.at(self.root, path)
        except FileNotFoundError:
            return File(path, -1, 0)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            why = reason(error) if isinstance(error, OSError) else error
            place = os.path.join(self.root, path)
            raise UserError(f"cannot read {place!r}: {why}") from error


def _read_list(
    table: Table, pictures: _Pictures, columns: tuple[int, int, bool], classes: list[str] | None,
    on_bad: str, faults: Faults, group: int | None,
) -> tuple[Listing, list[int]]:  # fmt: skip
    """The files of a list, and the first row of each of them; `classes` are those of the training
    pictures, None: the list has them. `group` is the column of the groups, None: there are none.
    Pictures that are missing are added to `faults`."""
    path = table.path
    names, labels, lines = _rows(table, columns, set(classes or ()), faults)
    groups = None if group is None else _groups(table, group, lines, required=classes is None)
    forms = by_form(classes or set(labels))
    notes = merged_note(set(labels), forms.values())
    labels = [forms[normalize("NFC", label)] for label in labels]
    if classes is None:
        numbers = all(label.isascii() and label.isdecimal() for label in labels)
        classes = sorted(set(labels), key=int if numbers else None)
    number = {label: i for i, label in enumerate(classes)}
    numbers_of = [number[label] for label in labels]
    files: list[File] = []
    with faults:
        files = pictures.take(names, lines, on_bad, notes.append)
    listing = Listing(path.parent, classes, files, numbers_of, [], notes, groups)
    first: dict[str, int] = {}
    places = [listing.path(row) for row in range(len(files))] or names
    rows = [first.setdefault(os.path.normpath(place), row) for row, place in enumerate(places)]
    if differ := [(one, row) for row, one in enumerate(rows) if labels[row] != labels[one]]:
        one, row = differ[0]
        others = f", and {counted(len(differ) - 1, 'other line')} likewise" if differ[1:] else ""
        raise UserError(
            f"{path}, lines {lines[one]} and {lines[row]} give {names[row]} the labels "
            f"{labels[one]!r} and {labels[row]!r}{others}: remove one of the lines"
        )
    return listing, [*first.values()]


def _groups(table: Table, column: int, lines: list[int], required: bool) -> list[str]:
    """Those of the rows in these lines; "" for none, unless they are `required`."""
    cells = {row.line: row.cells[column] for row in table.rows if row.problem is None}
    groups = [(cells[line] or "").strip() for line in lines]
    if required and "" in groups:
        where = f"{table.path}, line {lines[groups.index('')]}"
        raise UserError(f"{where} has no group (--group_column): correct it, or remove it")
    return groups


def _name_labels(table: Table, columns: tuple[int, int, bool]) -> None:
    """Replaces numbers and synsets in the column of the labels by the names of the classes."""
    rows = [row for row in table.rows[columns[2] :] if row.problem is None]
    labels = sorted({label for row in rows if (label := (row.cells[columns[1]] or "").strip())})
    named = dict(zip(labels, _names(table.path.parent, labels), strict=True))
    for row in rows:
        label = (row.cells[columns[1]] or "").strip()
        row.cells[columns[1]] = named.get(label, label)


def _rows(
    table: Table, columns: tuple[int, int, bool], known: set[str], faults: Faults
) -> tuple[list[str], list[str], list[int]]:
    """(files, labels, numbers of the lines) of a list. Labels must be in `known`, if any are; rows
    that cannot be used are added to `faults`."""
    path, known = table.path, {normalize("NFC", name) for name in known}
    names, labels, lines, others, bad = [], [], [], {}, []
    for row in table.rows[columns[2] :]:
        problem, name, label = row.problem, "", ""
        if problem is None:
            name, label = ((row.cells[j] or "").strip() for j in columns[:2])
            if not name or not label:
                problem = f"has no {'label' if name else 'file'}"
            elif known and normalize("NFC", label) not in known:
                others.setdefault(label, row.line)
        if problem is not None:
            bad.append(f"line {row.line} {problem}")
        if problem is not None or label in others:
            continue
        names.append(name)
        labels.append(label)
        lines.append(row.line)
    with faults:
        if bad:
            more = f", and {counted(len(bad) - 1, 'other line')} likewise" if bad[1:] else ""
            raise UserError(f"{path}, {bad[0]}{more}: correct it, or remove it")
    with faults:
        if others:
            some = ", ".join(f"{label!r} in line {line}" for label, line in [*others.items()][:5])
            count = counted(len(others), "label")
            raise UserError(f"{path} has {count} that the training pictures do not have: {some}")
    if not names and not bad and not others:
        raise UserError(f"{path} lists no pictures: give a file with a row for each picture")
    return names, labels, lines


def _first(table: Table) -> list[str]:
    """The names of the columns, or what stands in their place."""
    row = table.rows[0]
    if table.names is None and row.problem:
        raise UserError(f"{table.path}, line {row.line} {row.problem}: correct the line")
    return table.names or [(cell or "").strip() for cell in row.cells]


def known_columns(names: list[str], known: tuple[str, ...]) -> list[int]:
    """The places of the names that are in `known`, in the order of these."""
    plain = [" ".join(name.lower().replace("_", " ").split()) for name in names]
    return [plain.index(name) for name in known if name in plain]


def _file_column(table: Table, pictures: _Pictures, asked: str | None) -> tuple[int, bool]:
    """The column of the files, and whether a header names it."""
    names = _first(table)
    if asked is None and (known := known_columns(names, FILE_NAMES)):
        return known[0], table.names is None
    header = table.names is None and not any(map(pictures.find, names))
    named = names if header or table.names else []
    fit = [] if asked is None else [find_column(table, named, asked, "--image_column")]
    some = [row.cells for row in table.rows[:20] if row.problem is None]
    for anywhere in () if fit else (False, True):
        found = [[bool(pictures.find(cell or "", anywhere)) for cell in row] for row in some]
        fit = fit or [j for j in range(table.columns) if 2 * sum(r[j] for r in found) >= len(some)]
    if len(fit) != 1:
        raise UserError(
            f"{table.path} has the columns {', '.join(names)[:200]}: name that of the pictures' "
            "files with --image_column, and their folder with --image_dir"
        )
    return fit[0], header


def _columns(
    table: Table, pictures: _Pictures, image_column: str | None, label_column: str | None,
    leads: bool,
) -> tuple[int, int, bool]:  # fmt: skip
    """The columns of the file and of the label, counted from 0, and whether a header names them.
    Raises NoClasses if none is known to have labels. `leads`: the list is the first one that is
    read, so that it must have what is asked for."""
    file, header = _file_column(table, pictures, image_column)
    names, others = _first(table), [j for j in range(table.columns) if j != file]
    rows = [row.cells for row in table.rows[header:] if row.problem is None]
    named = names if header or table.names else []
    label = [j for j in known_columns(named, LABEL_NAMES) if j != file]
    there = named if named else [str(j + 1) for j in others]
    if label_column is not None and (leads or label_column in there):
        label = [find_column(table, named, label_column, "--label_column")]
    if label and leads:
        return file, label[0], header
    values = {j: {(row[j] or "").strip() for row in rows} for j in label or others}
    repeat = leads and len(values[others[0]]) < len(rows) if others else False
    if label_column is None and len(others) == 1 and (repeat or not (header or table.names)):
        label = others
    if label and any(values[label[0]]):
        return file, label[0], header
    what = f"has the columns {', '.join(names)[:200]}: name that of the classes with --label_column"
    several = [names[j] for j, cells in values.items() if cells <= {"0", "1", "0.0", "1.0"}]
    if len(several) > 1:
        what = "has classes in several columns: make one of them, in pandas by df['label'] = "
        what += f"df[{several}].idxmax(axis=1)"
    raise NoClasses(f"{table.path} {what}", len(rows))


def _told(table: Table, columns: tuple[int, int, bool]) -> str:
    """Which columns are taken, for messages."""
    file, label, header = columns
    names = table.names or (table.rows[0].cells if header else None)
    where = [str(j + 1) if names is None else f"{j + 1} ({names[j]})" for j in (file, label)]
    return f"files in column {where[0]} and classes in {where[1]}{table.remark}"


def _names(folder: Path, labels: list[str]) -> list[str]:
    """Names of the classes: numbers are lines of classes.txt, synsets those of their file."""
    lines = [line.strip() for line in text_lines(folder / CLASSES)]
    if all(label.isdecimal() and int(label) < len(lines) for label in labels):
        return told_apart({label: lines[int(label)] for label in labels})
    return class_names(folder, labels)
