"""Names of classes: Unicode forms of one name, names that look alike, lists of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from unicodedata import normalize

from ..plural import counted


def by_form(names: Iterable[str]) -> dict[str, str]:
    """The composed form (NFC) of each name -> the name of its class: the name itself, or, where
    names differ in their Unicode form alone, the composed one for all of them."""
    found: dict[str, str] = {}
    for name in names:
        form = normalize("NFC", name)
        found[form] = name if found.get(form, name) == name else form
    return found


def merged_note(names: set[str], classes: Iterable[str]) -> list[str]:
    """A line if some of `names` are in `classes` in another Unicode form."""
    merged = sorted(names.difference(classes))
    what = "is written in two Unicode forms, which are taken as one class"
    return [f"the class {normalize('NFC', name)!r} {what}" for name in merged[:1]]


def names_notes(classes: Sequence[str]) -> list[str]:
    """Lines on classes that are perhaps one, or none."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(" ".join(normalize("NFC", name).casefold().split()), []).append(name)
    notes = [
        f"the classes {' and '.join(map(repr, names))} differ in spaces, case or Unicode form "
        "alone: give them the same name if they are one class"
        for names in alike.values()
        if len(names) > 1
    ]
    parts = {name: set(filter(None, re.split(r"[\s,;|]+", name))) for name in classes}
    lists = [name for name in classes if len(parts[name]) > 1 and parts[name] <= parts.keys()]
    if lists:
        notes.append(
            f"{counted(len(lists), 'class')}, such as {lists[0]!r}, may be several labels: a "
            "sample has one class here, so each such list counts as a class of its own"
        )
    return notes
