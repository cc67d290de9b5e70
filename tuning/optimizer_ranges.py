"""`of: optimizer` in a space: the ranges that optimizers state in their files (utils/optim/)."""

from __future__ import annotations

from collections.abc import Mapping

from utils.errors import UserError
from utils.optim.entry import Range
from utils.optim.table import OPTIMIZERS
from utils.settings.aliases import ALIASES

WORD = "optimizer"  # what `of` says
FLAGS = "optimizer_flags"  # in the place of a setting: all that a single optimizer has


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
        if not any(map(_is_marker, parts)):
            expanded[name] = entry
        elif name == FLAGS:
            expanded |= _of_flags()
        else:
            setting = str(name).lstrip("-").replace("-", "_")
            own = _of_setting(ALIASES.get(setting, setting))
            if not own:
                raise UserError(f"{where}: {name}: of: {WORD}: no optimizer states a range for it")
            expanded[name] = [
                one for part in parts for one in (own if _is_marker(part) else [part])
            ]
    return expanded


def _is_marker(entry) -> bool:
    return isinstance(entry, Mapping) and dict(entry) == {"of": WORD}


def _of_setting(name: str) -> list[dict]:
    """Ranges of a setting that several optimizers have. Each range names one optimizer only, so
    that a new optimizer changes nothing in studies of the others."""
    return [
        _written(one, {"optimizer": optimizer})
        for optimizer, entry in OPTIMIZERS.items()
        for one in entry.ranges.get(name, ())
    ]


def _of_flags() -> dict[str, dict]:
    """Ranges of settings that only one optimizer has."""
    return {
        name: [_written(one, {}) for one in ranges]
        for entry in OPTIMIZERS.values()
        for name, ranges in entry.ranges.items()
        if name in entry.own
    }


def _written(one: Range, when: dict) -> dict:
    """A range as a space file has it."""
    when = when | dict(one.when)
    ends = {"low": one.low, "high": one.high, "scale": one.scale, "grid": [*one.grid]}
    return ends | ({"when": when} if when else {})
