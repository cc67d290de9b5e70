"""Groups of samples that no split takes apart: pictures of a patient, texts of an author."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from ..machine.packages import require
from ..plural import counted

# Values of --group_by; --group_column has the first two: unknown, and none.
ASK, NONE, FOLDER = "ask", "none", "folder"
# Divisions that are tried: DRAWS for each number of held-out groups, a factor of fraction * groups,
# as a few large groups may fit better, or many small ones. Of more groups than 10,000 fewer do.
FACTORS, DRAWS, DRAWN_GROUPS = (1, 0.25, 0.5, 0.75, 1.5, 2, 3, 4), 20, 200_000
# patient12_03.jpg, IMG_0001-2.png, video3_frame0001.jpg: what ends in a digit, and a counter.
LIKELY = re.compile(r"([^/]*\d)[ _.-][^/\d]*\d+\.\w+$")
NO_GROUP = re.compile(r"((19|20)\d\d[-_.]?[01]\d[-_.]?[0-3]\d|\bn\d{8})$")  # day, ImageNet's class
LOOKED_AT = 50_000  # files, or rows of a table


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of each sample.

    Attributes:
        flag: that asks for them, for messages: "--group_by folder".
        names: (samples,) object, the name of each sample's group; "" for none.
        notes: the data set's lines for the user, to which `hold_out` adds one.
    """

    flag: str
    names: np.ndarray
    notes: list[str]

    def part(self, index: np.ndarray) -> Groups:
        """Those of the samples `index` (n,) int64, in that order."""
        return replace(self, names=self.names[index])

    @property
    def key(self) -> str:
        """SHA-256 (hexadecimal) of the names."""
        return hashlib.sha256(json.dumps(self.names.tolist()).encode()).hexdigest()

    def hold_out(
        self, labels: np.ndarray, fraction: float, seed: int, classes: Sequence[str] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `stratified_split`, but of whole groups: only about `fraction` of each class is held
        out. Every class keeps a sample. A note tells the sizes."""
        names, of = np.unique(self.names, return_inverse=True)
        held = _choose(labels, of, fraction, seed) if len(names) > 1 else None
        if held is None:
            raise UserError(
                f"{self.flag}: of {counted(len(names), 'group')} ({_some(names)}) none can be held "
                "out without all samples of a class: choose smaller groups, or bring the splits "
                "yourself"
            )
        out = held[of]
        note = (
            f"{self.flag}: {held.sum():,} of {len(held):,} groups held out, with {out.sum():,} of "
            f"{len(out):,} samples: {100 * out.mean():.1f} %, for a fraction of {fraction:g}"
        )
        if lost := np.setdiff1d(labels, labels[out]).tolist():
            some = _some([str(label) if classes is None else classes[label] for label in lost])
            note += f"; no sample of {counted(len(lost), 'class')} is held out ({some})"
        self.notes.append(note)
        return np.flatnonzero(~out), np.flatnonzero(out)


def _choose(labels: np.ndarray, of: np.ndarray, fraction: float, seed: int) -> np.ndarray | None:
    """(groups,) bool: held out are those, of several drawn at random, whose samples are nearest to
    `fraction` of each class and of all. None if each group has all samples of a class.

    Args:
        of: (samples,) int64, the group of each sample, from 0 on without gaps.
    """
    from sklearn.model_selection import GroupShuffleSplit  # takes seconds

    every, (_, labels) = np.arange(of.max() + 1), np.unique(labels, return_inverse=True)
    # The samples of each class in each group, by class.
    pairs, samples = np.unique(labels * len(every) + of, return_counts=True)
    of_class, of_group = np.divmod(pairs, len(every))
    total = np.bincount(of_class, samples)  # (classes,)
    first_group = of_group[np.searchsorted(of_class, np.arange(len(total)))]  # of each class
    random, best, least = np.random.RandomState(seed), None, np.inf
    draws = min(DRAWS, max(1, DRAWN_GROUPS // len(every)))
    numbers = [round(fraction * len(every) * factor) for factor in FACTORS]
    for number in dict.fromkeys(min(max(1, n), len(every) - 1) for n in numbers):
        split = GroupShuffleSplit(draws, test_size=number, random_state=random)
        for _, drawn in split.split(every, groups=every):
            held = np.isin(every, drawn)
            lost = total == np.bincount(of_class, samples * held[of_group])
            held[first_group[lost]] = False  # every class keeps a group
            part = np.bincount(of_class, samples * held[of_group])
            error = np.abs(part / total - fraction).mean() + abs(part.sum() / len(of) - fraction)
            if held.any() and error < least:
                best, least = held, error
    return best


def groups_of(
    flag: str, splits: Mapping[str, Sequence[str] | None], notes: list[str]
) -> dict[str, Groups]:
    """Those of the splits that have some, each with the name of each sample's group. `notes` is
    given a line if groups are in two splits. Raises UserError without the package that divides."""
    splits = {split: names for split, names in splits.items() if names}
    if splits:
        require(flag, "scikit-learn")
    found = []
    for one, other in itertools.combinations(splits, 2):
        if both := sorted({*splits[one]} & {*splits[other]} - {""}):
            found.append(f"{len(both):,} in {one} and {other} ({_some(both)})")
    if found:
        told = "; ".join(found)
        notes.append(f"{flag}: groups are in two splits, which flatters the figures: {told}")
    return {split: Groups(flag, np.array(names, object), notes) for split, names in splits.items()}


def groups_of_files(paths: Sequence[str], by: str, below_class: bool) -> list[str]:
    """The name of each file's group. Raises UserError if files have none.

    Args:
        paths: relative to the folder of the split or of the list.
        by: FOLDER, that of the file; or a regular expression: its first capturing group, or all
            that it matches without one. An empty match makes the file a group of its own.
        below_class: the folder is that below the class, with which paths begin.
    """
    names: list[str] = []
    if by == FOLDER:
        for folder in map(os.path.dirname, paths):
            names.append(f"{folder}/".split("/")[1] if below_class else folder)
        what = "have no folder below their class: move them into some"
    else:
        for path in paths:
            match = re.search(by, path)
            found = "" if match is None else match[1 if match.groups() else 0] or path
            names.append(found)
        what = "do not match: correct it; with |$ at its end each of them is a group of its own"
    if missing := [path for path, name in zip(paths, names, strict=True) if not name]:
        count = f"{len(missing):,} of {len(paths):,} pictures"
        raise UserError(f"--group_by {by}: {count} ({_some(missing)}) {what}")
    return names


def likely_files(paths: Sequence[str], labels: Sequence[int]) -> list[str]:
    """A line if names of files suggest groups: two for each class on average, so that the name of a
    class before a running number is none."""
    groups, paths = dict[str, list[str]](), paths[:LOOKED_AT]
    for path in paths:
        found = LIKELY.match(os.path.basename(path))
        if found and not NO_GROUP.search(found[1]):
            groups.setdefault(found[1], []).append(path)
    several = [some for some in groups.values() if len(some) > 1]
    count = sum(map(len, several))
    if 2 * count < len(paths) or len(several) < 2 * len({*labels[:LOOKED_AT]}):
        return []
    pattern = LIKELY.pattern + "|$" * (sum(map(len, groups.values())) < len(paths))
    some = f"files such as {several[0][0]} and {several[0][1]} ({count - 2:,} more)"
    return [advice(some, "--group_by", pattern)]


def advice(which: str, flag: str, value: str) -> str:
    """The line on samples that may be groups."""
    return (
        f"{which} may belong together: {flag} '{value}' keeps them in one split; {flag} none says "
        "that they do not"
    )


def _some(names: Sequence[str] | np.ndarray) -> str:
    return ", ".join([*names[:3], *["..."] * (len(names) > 3)])
