"""What is tuned: the YAML of a space, read, checked, and proposed to a trial."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import yaml

from utils.aliases import ALIASES
from utils.config import COMMAND_LINE, DEFAULT, Config, convert, fields
from utils.errors import UserError
from utils.files import reason

KEYS = ("low", "high", "scale", "choices", "default", "grid", "when", "of")
SCALES = ("log", "linear", "int")
OUT_OF_REACH = "out of reach: "  # begins the note on a parameter that cannot be tuned as it is
DIGITS = 4  # significant ones of a proposed number, so that a recipe can be read


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One setting that is tuned.

    Attributes:
        name: of the setting.
        key: its name in the study: the setting's, with a number behind it where the space has
            several ranges for it.
        low, high: ends of the range; None with `choices`.
        scale: "log", "linear", "int"; "choice" with `choices`.
        default: where the search begins; in the range.
        grid: points of --sampler grid.
        when: setting -> the values with which this range counts.
        of_epochs: the value is a share of the run's epochs.
        integer: the setting is a whole number, on whatever scale.
    """

    name: str
    key: str
    low: float | None
    high: float | None
    scale: str
    choices: tuple
    default: object
    grid: tuple
    when: Mapping
    of_epochs: bool
    integer: bool

    def suggest(self, trial):
        """The value that a trial of Optuna proposes, rounded to DIGITS, within the range."""
        log = self.scale == "log"
        if self.scale == "choice":
            return trial.suggest_categorical(self.key, self.choices)
        if self.integer:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=log)
        value = trial.suggest_float(self.key, self.low, self.high, log=log)
        if log:
            value = float(f"{value:.{DIGITS}g}")
        else:
            value = round(value, DIGITS - 1 - math.floor(math.log10(self.high - self.low)))
        return min(max(value, self.low), self.high)

    def position(self, value) -> float | None:
        """Where a value lies in the range on its scale, 0 to 1; None for one of `choices`."""
        if self.scale == "choice":
            return None
        low, high = self.low, self.high
        if self.scale == "log":
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


class Space:
    """The parameters that are tuned, given what is fixed.

    Args:
        parameters: in the order of the file, in which they are proposed.
        config_class: of the entry's settings.
        raw: the settings of the base recipe that are not the entry's defaults.
    """

    def __init__(self, parameters: list[Parameter], config_class: type[Config], raw: dict):
        self.parameters, self.config_class, self.raw = parameters, config_class, raw

    def propose(self, take) -> dict:
        """{setting: value} of the parameters that count, with `take(parameter)` for the value; a
        parameter counts where its `when` holds and it has an effect with those before it."""
        values = {}
        for parameter in self.parameters:
            if parameter.name not in values and self._counts(parameter, values):
                values[parameter.name] = take(parameter)
        return values

    def suggest(self, trial) -> dict:
        return self.propose(lambda parameter: parameter.suggest(trial))

    def defaults(self) -> dict:
        """{key: value} of the first trial."""
        return {parameter.key: parameter.default for parameter in self.parameters}

    def grid(self) -> list[dict]:
        """{key: value} of every combination of the grid points of what counts; UserError where a
        parameter that counts has none."""
        counting = []
        self.propose(lambda parameter: counting.append(parameter) or parameter.default)
        for parameter in counting:
            if not parameter.grid:
                raise UserError(
                    f"--sampler grid: {parameter.name} has no grid points in the space; add "
                    "'grid: [...]', or leave it out by --params"
                )
        keys = [parameter.key for parameter in counting]
        return [
            dict(zip(keys, point, strict=True))
            for point in itertools.product(*(parameter.grid for parameter in counting))
        ]

    def _counts(self, parameter: Parameter, values: dict) -> bool:
        settings = effective(self.config_class, self.raw | values)
        for name, wanted in parameter.when.items():
            if getattr(settings, name) not in wanted:
                return False
        return parameter.name not in {name for name, _, _ in settings.ineffective()}


def effective(config_class: type[Config], values: Mapping) -> Config:
    """Settings with these values, and defaults for the others; not checked against each other."""
    defaults = {name: field.default for name, field in fields(config_class).items()}
    return config_class(**defaults | dict(values))


# ---- the file ---------------------------------------------------------------------------------


def load_space(
    path: Path, config_class: type[Config], settings: Config, origin: dict, params: str | None
) -> tuple[Space, dict, list[str]]:
    """The space that is searched.

    Args:
        path: of the YAML.
        config_class: of the entry's settings.
        settings, origin: the base recipe, as `utils.config.parse` gives it.
        params: --params.

    Returns:
        (space, raw, notes): `raw` is the base recipe as far as it is not the entry's defaults,
        with the defaults that the space itself gives; `notes` are lines for the user.

    Raises:
        UserError: the file cannot be read, is no space, or nothing is left to tune.
    """
    content = _read(path)
    known = fields(config_class)
    raw = {n: getattr(settings, n) for n in known if origin[n] != DEFAULT and n in known}
    raw = {n: v for n, v in raw.items() if n not in ("config", "output")}
    wanted = None if params is None else [_name(p, known, "--params") for p in params.split(",")]
    for name in wanted or ():
        if name not in {_name(str(key), known, str(path)) for key in content}:
            raise UserError(f"--params: {name} is not in {path}; it has {', '.join(content)}")
    parameters, notes, fixed = [], [], []
    for given, entry in content.items():
        name = _name(str(given), known, str(path))
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
    base = effective(config_class, raw)
    base.check()
    made, noted = [], {}
    for name, key, one, where in parameters:
        parameter, noted[key] = _parameter(name, key, one, where, config_class, raw)
        made.append(parameter)
    if fixed:
        notes.append(f"fixed by the command line, not tuned: {', '.join(fixed)}")
    space = Space(made, config_class, raw)
    counting = []
    tuned = space.propose(lambda parameter: counting.append(parameter.key) or parameter.default)
    for note in filter(None, map(noted.get, counting)):
        if note.startswith(OUT_OF_REACH):
            raise UserError(note.removeprefix(OUT_OF_REACH))
        notes.append(note)
    for name in wanted or ():
        if name not in tuned:
            why = {n: r for n, r, _ in effective(config_class, raw).ineffective()}
            raise UserError(f"--params {name}: {why.get(name, 'its `when` does not hold')}")
    if not tuned:
        raise UserError(f"{path}: nothing is left to tune: {'; '.join(notes) or 'it is empty'}")
    return space, raw, notes


def _read(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--space {path}: {reason(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"--space {path} is no valid YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"--space {path}: 'setting:' with low, high and scale, or choices, below")
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


def _parameter(
    name: str, key: str, entry, where: str, config_class: type[Config], raw: dict
) -> tuple[Parameter, str]:
    """A range of the file, checked; with a note where it had to be widened."""
    known = fields(config_class)
    field = known[name]
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: low, high and scale, or choices, are needed below it")
    for word in entry:
        if word not in KEYS:
            near = difflib.get_close_matches(str(word), KEYS, n=1, cutoff=0.5)
            hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(KEYS)}"
            raise UserError(f"{where}: unknown key {word!r}{hint}")
    if "of" in entry and not _of_epochs(entry):
        raise UserError(f"{where}: of: {entry['of']!r} is not epochs")
    when = _conditions(entry.get("when"), where, known)
    of_epochs, holds = _of_epochs(entry), _holds(entry, config_class, raw)
    # Of a range that counts with other settings than the recipe's: what they bring along.
    elsewhere = {n: wanted[0] for n, wanted in when.items()} if not holds else {}
    base = effective(config_class, raw | elsewhere)
    base.check()
    default = getattr(base, name)
    if of_epochs:
        default = round((default or 0) / base.epochs, DIGITS)

    def value(given, word: str):
        if given is None:
            raise UserError(f"{where}: {word} is missing")
        if of_epochs:
            share = _number(given)
            if share is None or not 0 <= share <= 1:
                raise UserError(f"{where}: {word} {given!r} is no share of the epochs, 0 to 1")
            return share
        return convert(field, given, f"{where}: {word}")

    if "default" in entry and (of_epochs or not holds) and name not in raw:
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
        ), ""
    scale = entry.get("scale", "linear")
    if scale not in SCALES:
        raise UserError(f"{where}: scale {scale!r} is not one of {', '.join(SCALES)}")
    low, high = (value(entry.get(end), end) for end in ("low", "high"))
    if isinstance(low, (str, bool)):
        raise UserError(f"{where}: --{name} is no number: give choices")
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
        note += f"holds: give a default, or choices: [{default}, ...]"
        default = low
    elif not low <= default <= high:
        low, high = min(low, default), max(high, default)
        note = f"{name}: its range is widened to {low:g} to {high:g}, to hold the recipe's own"
    return Parameter(name, key, low, high, scale, (), default, grid, when, of_epochs, integer), note


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
