"""Pictures in one folder per class.

    data_dir/train/<class>/...   and test/<class>/... or val/<class>/... or both
    data_dir/<class>/...         a part is held out, `test_fraction` (also of train/ alone)

valid/ and validation/ are other names of val/. val/ and test/ may hold their pictures without class
folders (imagenet.py).

Classes are the sorted folder names of the training pictures, with the names that a file of synsets
gives them (imagenet.py).
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from ...errors import Faults, UserError
from ...plural import counted
from ..class_names import by_form, merged_note
from .decode import strict_pillow, unreadable
from .file_formats import picture_endings, unread_formats
from .image_data import ImageData, PictureRequest
from .imagenet import NoClasses, class_names, flat_labels
from .listing import Listing, check_test_fraction, load_listings
from .records import File
from .scanning import FolderPart
from .split_names import PICTURES, SPLITS, by_split, is_ignored

LAYOUT = "expected train/<class>/, perhaps with test/<class>/ or val/<class>/, <class>/, or a list"
SHOWN = 5  # classes in a message
CHECKED = 1000  # pictures of a split that are read where something else is wrong already


def load_imagefolder(name: str, request: PictureRequest) -> ImageData:
    """The tree at `data_dir`, loaded by `load_listings`.

    val/ is the validation split if there is test/ with classes, else the test set. Files that are
    no pictures by their names are passed over and counted; one that has the name of a picture and
    cannot be decoded is an error.

    Raises:
        UserError: the tree has another layout, or see `load_listings`.
    """
    data_dir, cache_dir, classes = request.data_dir, request.cache_dir, request.classes
    if classes:
        listings = {"test": _list_all(data_dir, classes, cache_dir)}
    else:
        listings = list_tree(data_dir, request.test_fraction, cache_dir)
    if strays := [stray for listing in listings.values() for stray in listing.strays]:
        count = f"{counted(len(strays), 'file')} passed over, which are no pictures by their "
        count += f"names: {strays[0]}{', ...' * (len(strays) > 1)}"
        [*listings.values()][-1].notes.append("; ".join([count, *unread_formats(strays)]))
    data = load_listings(name, listings, request)
    return replace(data, classes=classes or class_names(data_dir, data.classes))


def list_tree(data_dir: Path, test_fraction: float | None, cache_dir: Path) -> dict[str, Listing]:
    """Split -> its files: {"train", "test" and/or "val"}, or {"all"} for a tree to be divided.

    A flat test/ without a file of classes, as of a competition, is left out, with a note.
    `cache_dir` is skipped if it is inside the tree.
    """
    folders = _folders(data_dir, cache_dir)
    beside = [name for name in SPLITS if name in folders]
    others = [name for name in folders if name not in SPLITS]
    # "train" is a class if it holds no folders and there are folders of other classes beside it.
    if "train" in beside and (not others or _folders(data_dir / "train", cache_dir)):
        words = by_split(data_dir, {name: f"{name}/" for name in beside})
        held_out = {split: word for split, word in words.items() if split != "train"}
        root = data_dir / "train"
    elif beside and not others:
        raise UserError(f"{data_dir} has {beside[0]}/ and no train/: {LAYOUT}")
    else:
        held_out, root = {}, data_dir
    if "test" not in held_out:  # else it counts if it has classes
        check_test_fraction(data_dir, [f"{word}/" for word in held_out.values()], test_fraction)
    faults = Faults()
    listings = {"train": _list_split(root, None, cache_dir, faults)}
    for split, word in held_out.items():  # val before test
        known = listings["train"].classes
        with faults:
            try:
                listings[split] = _list_split(data_dir / word, known, cache_dir, faults)
            except NoClasses as unlabelled:
                if split != "test":
                    raise
                listings["train"].notes.append(f"test/ {unlabelled.note}")
    for listing in listings.values() if faults.errors else ():
        some = FolderPart(listing.files[:CHECKED], listing.labels[:CHECKED])
        with faults, strict_pillow():
            if bad := some.scan(str(listing.root), thorough=False).bad:
                raise unreadable(bad)
    faults.tell()
    check_test_fraction(data_dir, [f"{s}/" for s in listings if s != "train"], test_fraction)
    return listings if len(listings) > 1 else {"all": listings["train"]}


def _list_all(root: Path, classes: list[str], cache_dir: Path) -> Listing:
    """All pictures of `root`, or of its splits, whose classes are known, for a trained model."""
    inner = _folders(root, cache_dir)
    # A word of a split is a class if it holds no folders.
    words = [
        word
        for word in SPLITS
        if word in inner and (word not in classes or _folders(root / word, cache_dir))
    ]
    names = sorted({name for word in words or [""] for name in _folders(root / word, cache_dir)})
    beside = [name for name in inner if words and name in classes and name not in words]
    if beside:
        raise UserError(
            f"{root} has the class {beside[0]!r} beside {words[0]}/: give one of its folders, or "
            "move one of these away"
        )
    lists = [word for word in SPLITS if (root / f"{word}.csv").is_file()]
    if lists and not set(names).intersection(classes):
        raise UserError(f"{root} has lists: give one of them, such as {root / lists[0]}.csv")
    folders = dict(zip(class_names(root, names), names, strict=True))  # of synsets
    known = [folders.get(name, name) for name in classes]
    parts, told, faults = {}, [], Faults()
    for word in words or [""]:
        try:
            parts[word] = _list_split(root / word, known, cache_dir, faults)
            told.append(f"{counted(len(parts[word].files), 'picture')} of {word}/")
        except NoClasses:
            if not parts:
                raise
            told.append(f"none of {word}/, whose classes are not known")
    faults.tell()
    whole = Listing(root, classes, [], [], [], [])
    for word, part in parts.items():
        for file in part.files:
            whole.files.append(file._replace(path=os.path.join(word, file.path)))
        whole.labels.extend(part.labels)
        whole.strays.extend(part.strays)
        whole.notes.extend(part.notes)
    whole.notes.extend([f"measured are {', '.join(told)}"] if words else [])
    return whole


def _list_split(root: Path, known: list[str] | None, cache_dir: Path, faults: Faults) -> Listing:
    """List the class folders of `root`; `known` are the classes of the training pictures. Folders
    that cannot be used are added to `faults`, and left out."""
    names = _folders(root, cache_dir)
    flat = ([], ["images"], ["unknown"], [root.name])  # the last as archives are unpacked
    if known is not None and names in flat and not set(names).intersection(known):
        return _list_flat(root, names, known)
    if not names:
        raise UserError(f"{root} has no class folders: {LAYOUT}")
    forms = by_form(names if known is None else known)
    class_of = {name: forms.get(normalize("NFC", name), name) for name in names}
    classes = sorted(forms.values()) if known is None else known
    with faults:
        if loose := _loose(root):
            raise UserError(
                f"{counted(len(loose), 'picture')} beside the class folders of {root}, such as "
                f"{loose[0]}: move each into the folder of its class, or elsewhere"
            )
    unknown = [name for name in names if class_of[name] not in classes]
    with faults:
        if unknown:
            some = ", ".join(map(repr, unknown[:SHOWN])) + ", ..." * (len(unknown) > SHOWN)
            raise UserError(
                f"{root} has {counted(len(unknown), 'class')} that the training pictures do not "
                f"have ({some}): give them the names of theirs, such as {classes[0]!r}, or move "
                "them away"
            )
    listing = Listing(root, classes, [], [], [], merged_note({*names}, classes))
    for name in filter(lambda name: class_of[name] in classes, names):
        files = sorted(walk(root / name, name, set(), listing.strays))
        with faults:
            unread = unread_formats(p for p in listing.strays if p.startswith(f"{name}/"))
            if not files and unread:
                raise UserError(f"{root / name} has no picture that can be read: {unread[0]}")
            if not files:
                raise UserError(
                    f"the class folder {root / name} has no pictures: add some, or remove it"
                )
        listing.files.extend(files)
        listing.labels.extend([classes.index(class_of[name])] * len(files))
    with faults:
        if known is None and len({*listing.labels}) == 1:
            raise UserError(
                f"{root} has pictures of one class alone, {classes[listing.labels[0]]!r}: a "
                "classifier needs two or more"
            )
    return listing


def _loose(root: Path) -> list[str]:
    """The pictures that lie in `root` itself, by their names."""
    names = sorted(path.name for path in root.iterdir() if path.suffix.lower() in PICTURES)
    return [name for name in names if not is_ignored(name)]


def _list_flat(root: Path, inner: list[str], classes: list[str]) -> Listing:
    """List a split without class folders: its pictures lie in `root`, or in the folder `inner`."""
    prefix = inner[0] if inner else "."
    strays: list[str] = []  # the file of classes is one, too
    files = sorted(walk(root / prefix, prefix, set(), strays))
    if not files:
        raise UserError(f"{root} has no class folders: {LAYOUT}")
    names = [os.path.basename(file.path) for file in files]
    labels = flat_labels(root.parent, root.name, names, classes)
    return Listing(root, classes, files, labels, [], [])


def walk(
    folder: Path | str, prefix: str, seen: set[tuple[int, int]], strays: list[str]
) -> list[File]:
    """Every picture below `folder`, whose path begins with `prefix`; the paths of other files are
    appended to `strays`.

    Links are followed. `seen` holds (device, inode) of the folders read so far: none is read
    twice, so that a loop of links ends.
    """
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:
            return []
        seen.add((here.st_dev, here.st_ino))
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    files = []
    for entry in entries:
        path = f"{prefix}/{entry.name}"
        if is_ignored(entry.name):
            strays += [path] if entry.is_file() else []
            continue
        try:
            found = entry.stat()
        except OSError:  # a broken link, which decoding reports as a bad file
            files.append(File(path, -1, 0))
            continue
        if stat.S_ISDIR(found.st_mode):
            files.extend(walk(entry.path, path, seen, strays))
        elif stat.S_ISREG(found.st_mode) and is_stray(entry.path):
            strays.append(path)
        else:
            files.append(File(path, found.st_size, found.st_mtime_ns))
    return files


def _folders(root: Path, cache_dir: Path) -> list[str]:
    """The sorted names of the folders in `root` that are neither hidden nor the cache."""
    cache = os.path.realpath(cache_dir)
    try:
        with os.scandir(root) as scan:
            return sorted(
                entry.name
                for entry in scan
                if entry.is_dir()
                and not is_ignored(entry.name)
                and os.path.realpath(entry.path) != cache
            )
    except OSError as error:
        raise UserError(
            f"cannot read the folder {root}: {error.strerror}; give the folder of your pictures "
            f"with --data_dir ({LAYOUT})"
        ) from error


def is_stray(path: str) -> bool:
    """Whether a file has another ending than pictures have."""
    ending = os.path.splitext(path)[1].lower()
    return bool(ending) and ending not in picture_endings()
