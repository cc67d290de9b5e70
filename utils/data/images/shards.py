"""Shards of encoded pictures: `--dataset tar` and `--dataset tfrecord`.

    data_dir/train-00000-of-00064.tar      and val-... (or valid-, validation-), test-...
    data_dir/imagenet1k-train-0000.tar     likewise; the split anywhere in the name
    data_dir/train/anything.tar            likewise; names do not matter there
    data_dir/data/train-00000.tar          likewise; in a folder of another name
    data_dir/anything.tar                  with `test_fraction` (also for train alone)

classes.txt, or a file of synsets (imagenet.py), names the classes, one a line.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import UserError
from ...files import reason
from .encoded_data import load_encoded
from .image_data import ImageData, PictureRequest
from .imagenet import all_class_names, text_lines
from .records import File
from .split_names import SPLITS, is_ignored, split_words
from .tar import TarShard
from .tfrecord import TFRecordShard

# What shards are called. ImageNet's TFRecords have no ending.
NAMES = {
    "tar": (TarShard, re.compile(r".*\.tar")),
    "tfrecord": (TFRecordShard, re.compile(r".*(\.tfrecords?(-.*)?|\.tfrec|-\d+-of-\d+)")),
}
CLASSES = "classes.txt"


def load_shards(name: str, request: PictureRequest) -> ImageData:
    """The shards in `data_dir`, indexed if need be. Raises UserError, see `load_encoded`."""
    root, (kind, pattern) = request.data_dir, NAMES[name]
    names = divided(root, find_shards(name, root, pattern), request.test_fraction)
    parts: dict[str, list] = {
        split: [kind([File.at(root, shard)]) for shard in some] for split, some in names.items()
    }
    return load_encoded(name, root, parts, request, listed_classes(root))


def find_shards(name: str, root: Path, pattern: re.Pattern) -> dict[str, list[str]]:
    """Split -> the sorted names of its files, relative to `root`; "all": of no known split.

    Raises:
        UserError: there are none.
    """
    files = [path for path in files_below(root, 1) if pattern.fullmatch(path.name.lower())]
    if not files:
        raise UserError(f"there are no {name} shards in {root}: give their folder with --data_dir")
    shards = [path.relative_to(root) for path in files]
    found: dict[str, list[str]] = {}
    for shard, word in zip(shards, split_words([shard.parts for shard in shards]), strict=True):
        found.setdefault(SPLITS.get(word, "all"), []).append(str(shard))
    return {split: sorted(names) for split, names in found.items()}


def divided(
    root: Path, found: dict[str, list[str]], test_fraction: float | None
) -> dict[str, list[str]]:
    """The splits of a data set, {"train", "test" and/or "val"} or {"all"}, from what `find_shards`
    has found. Raises UserError if they are none."""
    if len(found) == 1 and found.keys() <= {"train", "all"}:
        if test_fraction is None:
            raise UserError(
                f"{root} has no shards of a test set: they have val, valid, validation or test as "
                "a word in their names or those of their folders; rename them so, or, if there are "
                "none, hold out a part of the pictures, as with --test_fraction 0.2"
            )
        return {"all": next(iter(found.values()))}
    if "all" in found:
        raise UserError(
            f"{root / found['all'][0]} does not tell its split: names of shards, or of the folders "
            "that they are in, have train, val (valid, validation) or test as a word"
        )
    if "train" not in found:
        raise UserError(
            f"{root} has no training shards: they have train as a word in their names or those of "
            "their folders"
        )
    if test_fraction is not None:
        raise UserError(
            f"--test_fraction has no effect on {root}, which has a test set: leave it out"
        )
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def files_below(root: Path, depth: int) -> list[Path]:
    """Those in the folder and in `depth` levels of folders below it, but for ignored names."""
    try:
        paths = [path for path in sorted(root.iterdir()) if not is_ignored(path.name)]
    except OSError as error:
        raise UserError(
            f"cannot read the folder {root}: {reason(error)}; give the folder of your shards with "
            "--data_dir"
        ) from error
    inner = (files_below(path, depth - 1) for path in paths if depth and path.is_dir())
    return [path for path in paths if path.is_file()] + [file for some in inner for file in some]


def listed_classes(root: Path) -> list[str] | None:
    """The names of the classes, by a file that has them all; None without one."""
    if lines := text_lines(root / CLASSES):
        return [line.strip() for line in lines]
    return all_class_names(root)
