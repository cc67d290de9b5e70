"""Groups of samples that no split takes apart: pictures of a patient, texts of an author."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from ..machine.packages import require
from ..plural import counted

FOLDER = "folder"  # value of --group_by
# Divisions that are tried: DRAWS for each number of held-out groups, a factor of fraction * groups,
# since a few large groups may fit better, or many small ones.
DRAWS, FACTORS = 20, (1, 0.5, 2)
# patient12_03.jpg, video3/0001.jpg: names in which people and recordings are numbered.
LIKELY = re.compile(
    r"(patient|subject|person|participant|case|animal|slide|scan|video|clip|scene|session)"
    r"[ _-]?\d+",
    re.IGNORECASE,
)
LOOKED_AT = 50_000  # files


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

    def hold_out(
        self, labels: np.ndarray, fraction: float, seed: int, classes: Sequence[str] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `stratified_split`, but of whole groups, so that only about `fraction` of each class
        is held out: of several divisions the one that is nearest to it. Every class keeps a sample.
        A note tells the sizes."""
        names, of = np.unique(self.names, return_inverse=True)
        out = _choose(labels, of, fraction, seed) if len(names) > 1 else None
        if out is None:
            raise UserError(
                f"{self.flag}: of {counted(len(names), 'group')} ({_some(names)}) none can be held "
                "out without all samples of a class: choose smaller groups, or bring the splits "
                "yourself"
            )
        note = (
            f"{self.flag}: {len(np.unique(of[out])):,} of {len(names):,} groups held out, with "
            f"{out.sum():,} of {len(out):,} samples: {100 * out.mean():.1f} %, for a fraction of "
            f"{fraction:g}"
        )
        if lost := np.setdiff1d(labels, labels[out]).tolist():
            some = _some([str(label) if classes is None else classes[label] for label in lost])
            note += f"; no sample of {counted(len(lost), 'class')} is held out ({some})"
        self.notes.append(note)
        return np.flatnonzero(~out), np.flatnonzero(out)


def _choose(labels: np.ndarray, of: np.ndarray, fraction: float, seed: int) -> np.ndarray | None:
    """(samples,) bool: which are held out, nearest to `fraction` of each class and of all among
    several draws. None if each group has all samples of a class.

    Args:
        of: (samples,) int64, the group of each sample, from 0 on without gaps.
    """
    from sklearn.model_selection import GroupShuffleSplit  # takes seconds

    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    total, groups = np.bincount(labels), of.max() + 1
    random, best, least = np.random.RandomState(seed), None, np.inf
    for factor in FACTORS:
        number = min(max(1, round(factor * fraction * groups)), groups - 1)
        draws = GroupShuffleSplit(DRAWS, test_size=number, random_state=random)
        for _, drawn in draws.split(of, groups=of):
            out = np.zeros(len(of), bool)
            out[drawn] = True
            lost = np.bincount(labels[out], minlength=len(total)) == total
            out &= ~np.isin(of, of[first[lost]])  # every class keeps a group
            held = np.bincount(labels[out], minlength=len(total))
            error = np.abs(held / total - fraction).mean() + abs(out.mean() - fraction)
            if out.any() and error < least:
                best, least = out, error
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
    pattern = by
    what = "do not match: correct it; with |$ at its end each of them is a group of its own"
    if by == FOLDER:
        pattern = "^[^/]*/([^/]*)/" if below_class else "^(.*)/"
        what = "have no folder below their class: move them into some"
    names = []
    for path in paths:
        match = re.search(pattern, path)
        names.append("" if match is None else match[1 if match.groups() else 0] or path)
    if missing := [path for path, name in zip(paths, names, strict=True) if not name]:
        count = f"{len(missing):,} of {len(paths):,} pictures"
        raise UserError(f"--group_by {by}: {count} ({_some(missing)}) {what}")
    return names


def likely_files(paths: Sequence[str], classes: int) -> list[str]:
    """A line if names of files suggest groups: more than there are classes, and each with two files
    on average."""
    found = [match for match in map(LIKELY.search, paths[:LOOKED_AT]) if match]
    if not classes < len({match[0] for match in found}) <= len(found) / 2:
        return []
    word = found[0][1]
    return [
        f"files such as {found[0].string} may belong together: --group_by '({word}[ _-]?\\d+)' "
        f"keeps those of the same {word} in one split"
    ]


def _some(names: Sequence[str] | np.ndarray) -> str:
    return ", ".join([*names[:3], *["..."] * (len(names) > 3)])
