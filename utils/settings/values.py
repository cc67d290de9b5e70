"""One setting's value: the types, ranges and names that flags and YAML accept for it.

The rules are in the metadata of the setting's field (see utils/setting.py) and in aliases.py.
"""

import dataclasses
import difflib
import operator
import os
import re
import types
import typing
from collections.abc import Mapping

from ..errors import UserError
from .aliases import (
    ALIASES,
    GIVES_WAY,
    LOCAL,
    MEANT,
    NUMBER_FOR,
    PART_OF,
    SHORT_FOR,
    VALUE_ALIASES,
    VALUE_MEANINGS,
)

NOTHING: Mapping = types.MappingProxyType({})
_SWITCHED = {"true": True, "yes": True, "on": True, "1": True}
_SWITCHED |= {"false": False, "no": False, "off": False, "0": False}
# An end of a setting's range -> how it is said, and what holds inside of it.
_ENDS: dict[str, tuple[str, typing.Callable]] = {
    "low": ("of {} or more", operator.ge),
    "above": ("above {}", operator.gt),
    "high": ("up to {}", operator.le),
    "below": ("below {}", operator.lt),
}


def _expanded(text: str) -> str:
    """A shell leaves ~ as it is after = and in quotes."""
    return os.path.expanduser(text) if text.startswith("~/") else text


def convert(field: dataclasses.Field, value, where: str):
    """`value` as the field's type, or a UserError that begins with `where`."""
    meta = field.metadata
    kind, optional = type_of(field)
    aliases = VALUE_ALIASES.get(field.name, {})
    if value is False and "none" in (field.default, *choices_of(meta), *aliases):
        value = "none"  # it is `off` or `no` in YAML
    if isinstance(value, str | float):
        value = aliases.get(str(value).lower(), value)
    if value is None or (optional and value in ("none", "None", "null", "")):
        if optional:
            return None
        raise UserError(f"{where}: a value is needed ({values_text(field)})")
    wrong = UserError(f"{where}: {value!r} is not {values_text(field)}")
    if meta["many"]:
        parts = value if isinstance(value, list) else [value]
        if not all(type(part) in (str, int, float) for part in parts):
            raise UserError(f"{where}: {value!r} is not a text, a number, or a list of these")
        value = ",".join(part.strip() for text in parts for part in str(text).split(","))
    if (kind is bool or is_switch(meta)) and isinstance(value, str | int):
        value = _SWITCHED.get(str(value).lower(), value)
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, bool):
        if is_switch(meta):
            value = "on" if value else "off"
        elif value and meta["bare"] is not None:
            return meta["bare"]
        else:
            raise wrong
    try:
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise wrong
        if kind is str and not isinstance(value, (str, int, float)):  # a list or mapping of YAML
            raise wrong
        if kind is int and isinstance(value, str) and re.fullmatch(r"\d+\.0*", value):
            value = value.partition(".")[0]  # 1.0 is 1
        value = kind(value)
        if kind is str:
            value = ",".join(map(_expanded, value.split(","))) if meta["many"] else _expanded(value)
    except (ValueError, TypeError, OverflowError):
        raise wrong from None
    if field.name in NUMBER_FOR and (number := _number(value)) is not None:
        return number  # `spelled_out` replaces it
    if field.name == "optimizer" and str(value).lower() in LOCAL:
        return value.lower()  # likewise
    choices = choices_of(meta)
    if choices and value not in choices and str(value).lower() in choices:
        value = value.lower()  # FusedAdam
    if choices and value not in choices and not (meta["or_own"] and ".py:" in str(value)):
        meaning = VALUE_MEANINGS.get(field.name, {}).get(str(value).lower())
        if meaning is not None:
            raise UserError(f"{where} {value}: {meaning}")
        raise UserError(
            f"{where}: {value!r} is not {values_text(field)}{suggestion(value, choices)}"
        )
    ends = [(holds, meta[end]) for end, (_, holds) in _ENDS.items() if meta[end] is not None]
    is_finite = kind is str or (value == value and abs(value) != float("inf"))
    if not is_finite or not all(holds(value, end) for holds, end in ends):
        raise wrong
    return value


def values_text(field: dataclasses.Field) -> str:
    meta, (kind, _) = field.metadata, type_of(field)
    choices = choices_of(meta)
    if choices:
        return "one of " + ", ".join(map(str, choices)) + ", or FILE.py:NAME" * meta["or_own"]
    if kind is bool:
        return "true or false"
    text = {int: "a whole number", float: "a number", str: "a text"}[kind]
    bounds = [said.format(meta[end]) for end, (said, _) in _ENDS.items() if meta[end] is not None]
    return f"{text} {' and '.join(bounds)}".strip()


def choices_of(meta) -> list:
    choices = meta["choices"]
    return list(choices() if callable(choices) else choices or [])


def is_switch(meta) -> bool:
    """Whether on and off are among the choices; such a setting also accepts what a bool does."""
    return {"on", "off"} <= set(choices_of(meta))


def type_of(field: dataclasses.Field) -> tuple[typing.Any, bool]:
    """(int, float, bool or str; whether None is allowed)"""
    if isinstance(field.type, types.UnionType):
        kinds = [kind for kind in typing.get_args(field.type) if kind is not type(None)]
        return kinds[0], True
    return field.type, False


def plain_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def canonical_name(flag: str) -> str:
    return ALIASES.get(plain_name(flag), plain_name(flag))


def short_for(known) -> dict[str, tuple[str, object]]:
    """Those of SHORT_FOR whose setting the entry has."""
    return {flag: target for flag, target in SHORT_FOR.items() if target[0] in known}


def spelled_out(known, values: dict, where: str, beside: Mapping = NOTHING) -> dict:
    """`values` with the flags of PART_OF and SHORT_FOR, the optimizers of LOCAL and the numbers in
    place of words (NUMBER_FOR) replaced by the settings that they stand for; flags in GIVES_WAY
    also give way to `beside`. Raises UserError if one of these settings is given with another
    value, too, or if an --alpha may be either mixup's or that of local steps."""
    values = _with_parts(known, values, where, beside)
    short = [flag for flag in sorted(short_for(known)) if values.pop(flag, False)]
    targets = [(flag, *SHORT_FOR[flag]) for flag in short]
    optimizer, alpha = values.get("optimizer"), values.get("alpha")
    if optimizer in LOCAL:
        values["optimizer"] = LOCAL[optimizer]
        targets.append((f"optimizer {optimizer}", "strategy", "local"))
        if alpha is not None:
            targets.append((f"optimizer {optimizer}", "qsr_alpha", values.pop("alpha")))
    elif where == "--" and alpha is not None and {**beside, **values}.get("strategy") == "local":
        raise UserError(
            f"--alpha {alpha:g} beside --strategy local has two meanings: --mixup {alpha:g} is "
            f"mixup's alpha, --qsr_alpha {alpha:g} that of the rounds of local steps"
        )
    for (name, word), (other, meant) in MEANT.items():
        if {**beside, **values}.get(name) == word and values.get(other) is not None:
            values[name] = meant
    for name, (word, other, zero) in NUMBER_FOR.items():
        number = values.get(name)
        if not isinstance(number, float):
            continue
        values[name] = word if number else zero
        if number and values.setdefault(other, number) != number:
            raise UserError(
                f"{where}{name} {number:g} is short for --{name} {word} --{other} {number:g}, and "
                f"--{other} {values[other]:g} is given too: leave one of the two out"
            )
        if number:
            convert(known[other], number, f"{where}{name}")
    for flag, name, value in targets:
        if flag in GIVES_WAY and name in beside:
            continue
        if values.setdefault(name, value) != value and flag not in GIVES_WAY:
            raise UserError(
                f"{where}{flag} is short for --{name} {value}, and --{name} {values[name]} is "
                "given too: leave one of the two out"
            )
    return values


def parts_of(known) -> dict[str, tuple[str, int]]:
    """Those of PART_OF whose setting the entry has."""
    return {flag: target for flag, target in PART_OF.items() if target[0] in known}


def _with_parts(known, values: dict, where: str, beside: Mapping) -> dict:
    """`values` with the settings of which PART_OF's flags give single numbers; the others are those
    of `beside`, or of the default. Raises UserError if the setting is given as well."""
    joined: dict[str, list[str]] = {}
    for flag in [flag for flag in values if flag in PART_OF]:
        (name, position), text = PART_OF[flag], values.pop(flag)
        if name in values:
            raise UserError(
                f"{where}{flag} {text} is a part of --{name}, and --{name} {values[name]} is given "
                "too: leave one of the two out"
            )
        if _number(str(text)) is None:
            raise UserError(f"{where}{flag} {text}: a number is needed")
        whole = beside.get(name, known[name].default)
        joined.setdefault(name, whole.split(","))[position] = str(text)
    return values | {name: ",".join(numbers) for name, numbers in joined.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def suggestion(word: object, known, prefix: str = "", likeness: float = 0.65) -> str:
    """', did you mean ...?' with the nearest of the known names, their aliases included, if its
    likeness (0 to 1) is at least this."""
    names = {str(name): str(name) for name in known}
    names |= {alias: target for alias, target in ALIASES.items() if target in names}
    names |= {flag: flag for flag in short_for(known)}
    near = difflib.get_close_matches(plain_name(str(word)), names, n=1, cutoff=likeness)
    return f", did you mean {prefix}{names[near[0]]}?" if near else ""
