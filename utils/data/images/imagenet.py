"""ImageNet as people have it: a flat val/ with a file of classes, and names for synsets.

Files are searched for in the data set's folder and in val/ or test/ itself.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

from ...errors import UserError
from ...files import reason
from ...plural import counted
from .split_names import SPLITS

# Lines "n01440764 tench, Tinca tinca": the folder of a class, and its name.
SYNSETS = ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt")
# Lines of a file's name (with or without its ending) and its class, as the name of its folder or
# its number among the sorted folders, then perhaps more; between commas, tabs or blanks.
MAPPINGS = ("{}.txt", "{}.csv", "{}_annotations.txt", "LOC_{}_solution.csv")


class NoClasses(UserError):
    """Nothing tells the classes of so many `pictures`."""

    def __init__(self, text: str, pictures: int):
        super().__init__(text)
        self.note = f"has no classes: {counted(pictures, 'picture')} for --predict"


def class_names(root: Path, classes: Sequence[str]) -> list[str]:
    """The names of the classes, by a file of synsets in `root`; without one, or where it does not
    name them all, the classes themselves."""
    for name in SYNSETS:
        named = _synsets(root / name)
        if named and all(folder in named for folder in classes):
            return told_apart({folder: named[folder] for folder in classes})
    return list(classes)


def all_class_names(root: Path) -> list[str] | None:
    """The names of all classes in a file of synsets, in the order of these; None without one."""
    found = (_synsets(root / name) for name in SYNSETS)
    named = next(filter(None, found), None)
    return None if named is None else told_apart(dict(sorted(named.items())))


def _synsets(path: Path) -> dict[str, str]:
    lines = [line.split(maxsplit=1) for line in text_lines(path)]
    return {line[0]: line[1].strip() for line in lines if len(line) > 1}


def told_apart(named: dict[str, str] | dict[int, str]) -> list[str]:
    """The names, with the keys (synsets, numbers) of those that are alike: ImageNet has two classes
    "crane"."""
    counts = Counter(named.values())
    return [f"{name} ({key})" if counts[name] > 1 else name for key, name in named.items()]


def flat_labels(root: Path, split: str, files: Sequence[str], classes: Sequence[str]) -> list[int]:
    """The class of each file of a split that has no class folders.

    Args:
        root: of the data set.
        split: the folder's name.
        files: their sorted names.
        classes: the sorted names of the training pictures' folders.

    Raises:
        NoClasses: there is no file of classes.
        UserError: it does not name a known class for each file.
    """
    known = {name: number for number, name in enumerate(classes)}
    known |= {str(number): number for number in range(len(classes)) if str(number) not in known}
    places = [root, root / split]
    words = dict.fromkeys((split, SPLITS.get(split, split)))  # valid/ may come with val.txt
    patterns = [pattern.format(word) for word in words for pattern in MAPPINGS]
    for path in (place / pattern for place in places for pattern in patterns):
        if any(named := _listed(path, text_lines(path), files, known)):  # else it has other columns
            return _numbers(path, named, files, known)
    mappings = ", ".join(pattern.format(split) for pattern in MAPPINGS)
    raise NoClasses(
        f"{root / split} has pictures and no class folders: make a folder for each class, or add "
        f"a file with the class of each picture, named {mappings}; or move the folder away if its "
        "classes are not known",
        len(files),
    )


def _listed(
    path: Path, lines: Sequence[str], files: Sequence[str], known: Container[str]
) -> list[str | None]:
    """The class of each file by the lines of `path`: by its full name, else by its stem."""
    stems = Counter(Path(file).stem for file in files)
    names = {*files, *stems}
    found: dict[str, set[str]] = {}  # full name or stem -> classes
    for name, label in filter(None, (_mapping(line, names) for line in lines)):
        # What follows the class, as Kaggle's places of objects, does not belong to its name.
        label = label if label in known else label.replace(",", " ").split()[0]
        found.setdefault(name, set()).add(label)

    def class_of(file: str) -> str | None:
        name = file if file in found else Path(file).stem
        labels = sorted(found.get(name, ()))
        if labels and name != file and stems[name] > 1:
            raise UserError(
                f"{path} gives {name} a class, and {file} is not the only picture of that name: "
                "list the files with their endings"
            )
        if len(labels) > 1:
            raise UserError(
                f"{path} gives {name} the classes {labels[0]!r} and {labels[1]!r}: correct its "
                "lines"
            )
        return labels[0] if labels else None

    return [class_of(file) for file in files]


def _mapping(line: str, names: set[str]) -> tuple[str, str] | None:
    """(name, class) of the picture that a line is about, if its name or its stem is one of `names`.
    Names with blanks stand between commas or tabs; a line without them may have commas in what
    follows the class."""
    try:
        quoted = next(csv.reader([line]))
    except csv.Error:  # more than 128 KB
        quoted = line.split(",")
    for cells in (quoted, line.split("\t"), line.split()):
        if len(cells) < 2 or not cells[1].strip():
            continue
        file = Path(cells[0].strip())
        if file.name in names:
            return file.name, cells[1].strip()
        # More than one word after the dot: another separator belongs between these.
        if file.stem in names and len(file.suffix.split()) < 2:
            return file.stem, cells[1].strip()
    return None


def _numbers(
    path: Path, named: Sequence[str | None], files: Sequence[str], known: dict[str, int]
) -> list[int]:
    for name, file in zip(named, files, strict=True):
        if name is None:
            raise UserError(f"{path} does not name the class of {file}: add a line, or remove it")
        if name not in known:
            raise UserError(
                f"{path} gives {file} the class {name!r}, which the training pictures do not have"
            )
    return [known[name] for name in named]


def text_lines(path: Path) -> list[str]:
    """Those of a text file that are not empty; none if it is not there."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    return [line for line in text.splitlines() if line.strip()]
