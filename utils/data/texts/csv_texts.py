"""The user's own texts: a training file, a test set (a file, or a part of the training file that is
held out), and perhaps a validation file."""

from pathlib import Path

import numpy as np

from ...errors import Faults, UserError
from ..groups import Groups, groups_of
from ..splits import TEST_SEED, split_off
from .files import file_kind, read_text_file
from .rows import Samples, read_samples, whole_number
from .sources import TextData, TextRequest, Texts, TextSource

CLASS_NAMES = "classes.txt"
_PLAUSIBLE_CLASSES = 20  # more than these must be at most half as many as the texts
VERSION = 2  # of reading and cleaning; part of the cache's key
OWN_VERSION = 4  # the same of the user's own files, whose columns and classes are guessed


def open_csv(name: str, request: TextRequest) -> TextSource:
    """Checks that `train_file`, `test_file` and `val_file` can be used together.

    Raises:
        UserError: one is needed and not given, is of an unknown kind, or is the training file.
    """
    if request.train_file is None:
        raise UserError(
            "--dataset csv needs --train_file (.csv, .tsv or .jsonl), and --test_file or "
            "--test_fraction"
        )
    if request.test_file is None and request.test_fraction is None:
        raise UserError(
            "--dataset csv needs a test set: --test_file, or --test_fraction to hold out a part of "
            "the training file"
        )
    given = {"train": request.train_file, "test": request.test_file, "val": request.val_file}
    files = {role: path for role, path in given.items() if path is not None}
    for path in files.values():
        file_kind(path)
    for role in ("test", "val"):
        if role in files and _is_same(files[role], files["train"]):
            raise UserError(
                f"--{role}_file is the training file, which says nothing about new texts: use "
                f"--{role}_fraction to hold out a part of it"
            )
    description = ", ".join(str(path) for path in files.values())
    names = request.train_file.parent / CLASS_NAMES
    every = files | ({"classes": names} if names.is_file() else {})
    return TextSource(name, every, OWN_VERSION, description, lambda: _load(request, files))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _load(request: TextRequest, files: dict[str, Path]) -> TextData:
    samples = read_files(request, files)
    classes = sort_classes(samples["train"].labels)
    if len(classes) < 2:
        raise UserError(
            f"{files['train']} has only one class, {classes[0][:40]!r}, and at least two are "
            "needed: is it the right column (--label_column)?"
        )
    if len(classes) > max(_PLAUSIBLE_CLASSES, len(samples["train"].texts) / 2):
        raise UserError(
            f"{files['train']} has {len(classes):,} classes for {len(samples['train'].texts):,} "
            "texts: is it the right column (--label_column)?"
        )
    notes = notes_of(samples)
    named = {role: part.groups for role, part in samples.items()}
    groups = groups_of(f"--group_column {request.group_column}", named, notes)
    texts = {role: to_texts(part, classes, groups.get(role)) for role, part in samples.items()}
    if request.test_fraction is not None:
        train, test = split_off(texts["train"], request.test_fraction, TEST_SEED, classes)
        texts["train"], texts["test"] = train, test
        notes += repeated_texts("the test texts held out", train.texts, test.texts)
    classes, note = class_names(files["train"], classes, request.encoding)
    notes += [] if note is None else [note]
    return TextData(
        classes=classes,
        train=texts["train"],
        test=texts["test"],
        val=texts.get("val"),
        skipped=sum(len(part.problems) for part in samples.values()),
        notes=notes,
    )


def class_names(
    train_file: Path, classes: list[str], encoding: str | None = None
) -> tuple[list[str], str | None]:
    """(the names of the classes, a note): of classes that are numbers, from the lines of a file
    beside the training file, if there is one and it fits.

    Its first line names class 0 if there is such a class; it names class 1 if there are names for
    exactly the numbers from 1 to the largest.
    """
    path = train_file.parent / CLASS_NAMES
    if not path.is_file() or not all(map(whole_number, classes)):
        return classes, None
    unused = f"{CLASS_NAMES} beside {train_file.name} is not used: "
    try:
        lines = read_text_file(path, encoding)[0].splitlines()
    except UserError as error:
        return classes, f"{unused}{error}"
    names = [name for line in lines if (name := line.strip())]
    numbers = [int(whole_number(name)) for name in classes]
    first, largest = min(1, *numbers), max(numbers)
    missing = largest + 1 - first - len(names)  # below 0: too many, which are right from class 0 on
    plain = all(map(str.isdecimal, classes)) and len(set(names)) == len(names)
    if not plain or missing > 0 or (missing and first):
        return classes, unused + (
            f"it needs a name of its own on each line, for the whole numbers from {first} to "
            f"{largest}"
        )
    names = [names[int(name) - first] for name in classes]
    return names, (
        f"names of the classes from {CLASS_NAMES} beside {train_file.name}, whose first line is "
        f"class {first}"
    )


def read_files(
    request: TextRequest,
    files: dict[str, Path],
    classes: tuple[str, ...] = (),
    line_end: str | None = None,
) -> dict[str, Samples]:
    """The samples of each file, by role. `classes` are those that a row may have; empty: those of
    the training file. `line_end`: see `read_samples`."""
    samples: dict[str, Samples] = {}
    faults = Faults()
    for role, path in files.items():
        with faults:
            samples[role] = read_samples(path, request, classes=classes, line_end=line_end)
            classes = classes or tuple(set(samples[role].labels))
    faults.tell()
    return samples


def notes_of(samples: dict[str, Samples]) -> list[str]:
    """Lines on the columns taken, on bad rows, and on texts that are in the training file, too."""
    notes = []
    for part in samples.values():
        notes.append(part.note)
        if part.problems:
            notes.append(part.left_out() + part.lost(whole=True))
        before, after = part.different, len(set(part.texts))
        if after <= 0.99 * before:
            notes.append(
                f"note: {part.path.name}: {before:,} different texts are {after:,} after cleaning "
                "(--no_clean_text keeps links and markup)"
            )
    for role, part in samples.items():
        if role != "train" and "train" in samples:
            notes += repeated_texts(part.path.name, samples["train"].texts, part.texts)
    return notes


def repeated_texts(name: str, trained: list[str], tested: list[str]) -> list[str]:
    """A line if some of the texts `tested`, which are those of `name`, are also trained on."""
    in_training = set(trained)
    known = sum(text in in_training for text in tested)
    if not known:
        return []
    return [
        f"{name}: {known:,} of {len(tested):,} texts are in the training data, too, which flatters "
        "the figures"
    ]


def sort_classes(labels: list[str]) -> list[str]:
    """The distinct labels, by value if all are numbers, else in alphabetical order."""
    names = set(labels)
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def to_texts(samples: Samples, classes: list[str], groups: Groups | None = None) -> Texts:
    place = {name: index for index, name in enumerate(classes)}
    labels = np.fromiter((place[label] for label in samples.labels), np.int64, len(samples.labels))
    return Texts(samples.texts, labels, groups, np.array(samples.lines, np.int64))
