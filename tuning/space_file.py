"""The YAML of a space: read, and checked against the flags of the entry."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path

from tuning.flags import REFUSED
from tuning.optimizer_ranges import with_optimizers
from tuning.recipe import OF_THE_PLACE
from tuning.space import DIGITS, Parameter, Space, effective
from utils.errors import UserError
from utils.settings.aliases import ALIASES
from utils.settings.config import COMMAND_LINE, DEFAULT, Config, fields
from utils.settings.values import convert
from utils.settings.yaml_file import read_yaml_file

KEYS = ("low", "high", "scale", "choices", "default", "grid", "when", "of")
SCALES = ("log", "linear", "int")
# Begins the note on a parameter whose range cannot contain its default.
OUT_OF_REACH = "out of reach: "
DATA: tuple = ("dataset", "data_dir", "train_file", "val_file", "test_file", "label_column")
DATA += ("val_fraction", "val_is_validation", "test_fraction", "image_column", "image_dir")
NOT_IN_TRIALS = ("early_stop_patience", "flip_test", "final_test", "report", "checkpoint_hist")
# Settings that no space may tune, and why.
UNTUNABLE = REFUSED | {
    "epochs": "the stages decide on the epochs of a trial",
    "subset": "the stages decide on the data of a trial",
    "seed": "it would find a lucky seed, not good settings",
    "eval_every": "a search decides when trials are evaluated",
    "predictions": "it belongs to a trained model",
    **dict.fromkeys(DATA, "trials are compared on the same data"),
    **dict.fromkeys(NOT_IN_TRIALS, "trials do without it"),
    **dict.fromkeys(OF_THE_PLACE, "it is no part of the resulting recipe"),
}


def load_space(
    path: Path, config_class: type[Config], settings: Config, origin: dict, params: str | None
) -> tuple[Space, dict, list[str]]:
    """The space that is searched.

    Args:
        path: of the YAML.
        config_class: of the entry's settings.
        settings, origin: the base recipe, as `utils.settings.config.parse` gives it.
        params: --params.

    Returns:
        (space, raw, notes): `raw` has the settings of the base recipe that are not the entry's
        defaults, and the defaults that the space itself gives; `notes` are lines for the user.

    Raises:
        UserError: the file cannot be read or is not a space, or nothing is left to tune.
    """
    content = with_optimizers(_read(path), str(path))
    known = fields(config_class)
    raw = {n: getattr(settings, n) for n in known if origin[n] != DEFAULT and n in known}
    raw = {n: v for n, v in raw.items() if n not in ("config", "host_config", "output")}
    wanted = None if params is None else [_name(p, known, "--params") for p in params.split(",")]
    for name in wanted or ():
        if name not in {_name(str(key), known, str(path)) for key in content}:
            raise UserError(f"--params: {name} is not in {path}; it has {', '.join(content)}")
    parameters, notes, fixed = [], [], []
    for given, entry in content.items():
        name = _name(str(given), known, str(path))
        if name in UNTUNABLE:
            raise UserError(f"{path}: {given} cannot be tuned: {UNTUNABLE[name]}; leave it out")
        if origin[name] == COMMAND_LINE:
            fixed.append(f"{name} {getattr(settings, name)}")
            if wanted and name in wanted:
                raise UserError(f"--{name} is given, so it is fixed: leave it out of --params")
            continue
        if wanted is not None and name not in wanted:
            continue
        ranges = entry if isinstance(entry, list) else [entry]
        for index, one in enumerate(ranges):
            where = f"{path}: {given}" + (f", range {index + 1}" if len(ranges) > 1 else "")
            key = name if len(ranges) == 1 else f"{name}.{index + 1}"
            if name not in raw and _has_default(one) and _holds(one, config_class, raw):
                raw[name] = convert(known[name], one["default"], f"{where}: default")
            parameters.append((name, key, one, where))
    effective(config_class, raw).validate()
    made = _reachable(parameters, config_class, raw)
    if fixed:
        notes.append(f"fixed by the command line, not tuned: {', '.join(fixed)}")
    space = Space(made, config_class, raw)
    applying = []
    tuned = space.propose(lambda one: applying.append(one) or one.default)  # type: ignore[func-returns-value]  # None
    for note in filter(None, (parameter.note for parameter in applying)):
        if note.startswith(OUT_OF_REACH):
            raise UserError(note.removeprefix(OUT_OF_REACH))
        notes.append(note)
    for name in wanted or ():
        if name not in tuned:
            idle = effective(config_class, raw).without_effect()
            why, _ = idle.get(name, ("its `when` does not hold", ""))
            raise UserError(f"--params {name}: {why}")
    if not tuned:
        raise UserError(f"{path}: nothing is left to tune: {'; '.join(notes) or 'it is empty'}")
    return space, raw, notes


def _read(path: Path) -> dict:
    content = read_yaml_file(path, "--space")
    if not isinstance(content, Mapping) or not content:
        raise UserError(
            f"--space {path}: 'setting:' lines are needed, each with low, high and scale, or "
            "choices, below it"
        )
    return dict(content)


def _name(given: str, known: Mapping, where: str) -> str:
    name = given.strip().lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"{where}: unknown setting {given!r}{hint}")
    return name


def _of_epochs(entry: Mapping) -> bool:
    return entry.get("of") == "epochs"


def _reachable(
    ranges: list[tuple[str, str, Mapping, str]], config_class: type[Config], raw: dict
) -> list[Parameter]:
    """The ranges, (setting, key, entry of the file, where it stands) of each, that a trial can use,
    checked. The key of a setting's only remaining range loses its number."""
    base, left = effective(config_class, raw), []
    settled = set()  # settings with a range that holds in every trial

    def can_be(name: str, value) -> bool:
        """Whether a trial has this value when a range is proposed: settings come in order."""
        before = [one for one in left if one.name == name]
        return getattr(base, name) == value or any(one.contains(value) for one in before)

    for name, key, entry, where in ranges:
        _check_keys(entry, where)
        wanted = _conditions(entry.get("when"), where, fields(config_class))
        possible = {n: [v for v in values if can_be(n, v)] for n, values in wanted.items()}
        if name in settled or not all(possible.values()):
            continue
        if not {one.name for one in left} & {*wanted}:
            settled.add(name)
        # The settings under which a range holds that does not hold for the recipe: its default may
        # depend on them.
        holds = all(getattr(base, n) in values for n, values in wanted.items())
        elsewhere = {} if holds else {n: values[0] for n, values in possible.items()}
        recipe = effective(config_class, raw | elsewhere)
        try:
            recipe.validate()
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        own_default = "default" in entry and (_of_epochs(entry) or not holds) and name not in raw
        left.append(_parameter(name, key, entry, where, wanted, recipe, own_default))
    names = [one.name for one in left]
    return [
        dataclasses.replace(one, key=one.name if names.count(one.name) == 1 else one.key)
        for one in left
    ]


def _has_default(entry) -> bool:
    return isinstance(entry, Mapping) and "default" in entry and not _of_epochs(entry)


def _holds(entry: Mapping, config_class: type[Config], raw: dict) -> bool:
    when = entry.get("when")
    if not isinstance(when, Mapping):
        return True
    base = effective(config_class, raw)
    return all(getattr(base, str(n), None) in _listed(v) for n, v in when.items())


def _listed(value) -> tuple:
    return tuple(value) if isinstance(value, list) else (value,)


def _check_keys(entry, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: low, high and scale, or choices, are needed below it")
    for word in entry:
        if word not in KEYS:
            near = difflib.get_close_matches(str(word), KEYS, n=1, cutoff=0.5)
            hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(KEYS)}"
            raise UserError(f"{where}: unknown key {word!r}{hint}")
    if "of" in entry and not _of_epochs(entry):
        raise UserError(f"{where}: of: {entry['of']!r} is not epochs")


def _parameter(
    name: str,
    key: str,
    entry: Mapping,
    where: str,
    when: dict,
    recipe: Config,
    own_default: bool,
) -> Parameter:
    """A range of the file, checked.

    Args:
        when: its conditions.
        recipe: the settings under which it holds.
        own_default: its default is that of the file, not of the recipe.
    """
    field, of_epochs = fields(type(recipe))[name], _of_epochs(entry)
    default = getattr(recipe, name)
    if of_epochs:
        default = round((default or 0) / recipe.epochs, DIGITS)

    def value(given, word: str):
        if given is None:
            raise UserError(f"{where}: {word} is missing")
        if of_epochs:
            fraction = _number(given)
            if fraction is None or not 0 <= fraction <= 1:
                raise UserError(
                    f"{where}: {word} {given!r} is not a fraction of the epochs, 0 to 1"
                )
            return fraction
        return convert(field, given, f"{where}: {word}")

    if own_default:
        default = value(entry["default"], "default")
    grid = entry.get("grid") or []
    if not isinstance(grid, list):
        raise UserError(f"{where}: grid: a list such as [0.1, 0.2] is needed")
    grid = tuple(value(point, "grid") for point in grid)
    if "choices" in entry:
        given = entry["choices"]
        if {"low", "high", "scale"} & {*entry} or not isinstance(given, list) or len(given) < 2:
            raise UserError(f"{where}: choices is a list of two or more, without low, high, scale")
        choices = tuple(None if c is None else value(c, "choices") for c in given)
        if default not in choices:
            choices += (default,)
        grid = grid or choices
        return Parameter(
            name, key, None, None, "choice", choices, default, grid, when, of_epochs, False
        )
    scale = entry.get("scale", "linear")
    if scale not in SCALES:
        raise UserError(f"{where}: scale {scale!r} is not one of {', '.join(SCALES)}")
    low, high = (value(entry.get(end), end) for end in ("low", "high"))
    if isinstance(low, (str, bool)):
        raise UserError(f"{where}: --{name} is not a number: give choices")
    if not low < high:
        raise UserError(f"{where}: low {low:g} is not below high {high:g}")
    if scale == "log" and low <= 0:
        raise UserError(f"{where}: scale log needs low above 0, not {low:g}")
    integer = scale == "int" or isinstance(low, int)
    if integer and not (float(low).is_integer() and float(high).is_integer()):
        raise UserError(f"{where}: scale int needs whole numbers, not {low:g} and {high:g}")
    for point in grid:
        if not low <= point <= high:
            raise UserError(f"{where}: grid point {point:g} lies outside of {low:g} to {high:g}")
    note = ""
    if default is None or (scale == "log" and default <= 0):
        note = f"{OUT_OF_REACH}{where}: the recipe has {default}, which no range of scale {scale} "
        note += f"contains: give a default, or choices: [{default}, ...]"
        default = low
    elif not low <= default <= high:
        low, high = min(low, default), max(high, default)
        note = f"{name}: its range is widened to {low:g} to {high:g}, to include the recipe's own"
    return Parameter(name, key, low, high, scale, (), default, grid, when, of_epochs, integer, note)


def _conditions(when, where: str, known: Mapping) -> dict:
    if when is None:
        return {}
    if not isinstance(when, Mapping):
        raise UserError(f"{where}: when: 'setting: value' is needed, as in {{optimizer: sgd}}")
    conditions = {}
    for given, wanted in when.items():
        name = _name(str(given), known, f"{where}: when")
        conditions[name] = tuple(
            convert(known[name], one, f"{where}: when: {given}") for one in _listed(wanted)
        )
    return conditions


def _number(given) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError):
        return None
