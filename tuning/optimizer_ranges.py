"""The ranges that optimizers state in their files (utils/optim/), for a space that says
`of: optimizer` in place of a range."""

from __future__ import annotations

from collections.abc import Mapping

from utils.errors import UserError
from utils.optim.entry import Range
from utils.optim.table import OPTIMIZERS
from utils.settings.values import canonical_name

MARKER = {"of": "optimizer"}  # in place of a range: those of the optimizers
FLAGS = "optimizer_flags"  # in place of a setting: all settings that only one optimizer has


def with_optimizers(content: Mapping, where: str) -> dict:
    """The content of a space with ranges in place of `of: optimizer`.

    Args:
        where: the file, for messages.

    Raises:
        UserError: no optimizer states a range for the setting.
    """
    expanded = {}
    for name, entry in content.items():
        parts = entry if isinstance(entry, list) else [entry]
        if MARKER not in parts:
            expanded[name] = entry
        elif name == FLAGS:
            expanded |= _of_flags()
        else:
            stated = _of_setting(canonical_name(str(name)))
            if not stated:
                raise UserError(f"{where}: {name}: of: optimizer: no optimizer states a range")
            expanded[name] = [
                one for part in parts for one in (stated if part == MARKER else [part])
            ]
    return expanded


def _of_setting(name: str) -> list[dict]:
    """Ranges of a setting that several optimizers have. Each range names one optimizer only, so
    that a new optimizer changes nothing in studies of the others."""
    return [
        _as_in_a_file(one, {"optimizer": optimizer})
        for optimizer, entry in OPTIMIZERS.items()
        for one in entry.ranges.get(name, ())
    ]


def _of_flags() -> dict[str, list[dict]]:
    """Ranges of settings that only one optimizer has."""
    return {
        name: [_as_in_a_file(one, {}) for one in ranges]
        for entry in OPTIMIZERS.values()
        for name, ranges in entry.ranges.items()
        if name in entry.own
    }


def _as_in_a_file(one: Range, when: dict) -> dict:
    """A range as in a space file; `when`: settings with which it applies, added to its own."""
    when = when | dict(one.when)
    ends = {"low": one.low, "high": one.high, "scale": one.scale, "grid": [*one.grid]}
    return ends | ({"when": when} if when else {})
