"""The YAML of a space: read, and checked against the flags of the entry."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path

from utils.errors import UserError
from utils.optim.entry import Range
from utils.optim.table import OPTIMIZERS
from utils.settings.config import COMMAND_LINE, DEFAULT, Config, fields
from utils.settings.values import canonical_name, convert, suggestion
from utils.settings.yaml_file import read_yaml_file

from .flags import REFUSED
from .recipe import OF_THE_PLACE
from .space import DIGITS, Parameter, Space, effective

# In place of a range: those that the optimizers state in their files (utils/optim/).
OF_OPTIMIZER = {"of": "optimizer"}
OPTIMIZER_FLAGS = "optimizer_flags"  # in place of a setting: all that only one optimizer has
KEYS = ("low", "high", "scale", "choices", "default", "grid", "when", "of")
SCALES = ("log", "linear", "int")
# Begins the note on a parameter whose range cannot contain its default.
OUT_OF_REACH = "out of reach: "
DATA: tuple = ("dataset", "data_dir", "train_file", "val_file", "test_file", "label_column")
DATA += ("val_fraction", "val_is_validation", "test_fraction", "image_column", "image_dir")
DATA += ("group_by", "group_column", "labels")
NOT_IN_TRIALS: tuple = ("early_stop_patience", "eval_views", "final_test", "report", "baseline")
NOT_IN_TRIALS += ("checkpoint_hist",)
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
        settings, origin: the base recipe, as `utils.settings.config.parse` gives it.

    Returns:
        (space, raw, notes): `raw` has the settings of the base recipe that are not the entry's
        defaults, and the defaults that the space itself gives; `notes` are lines for the user.

    Raises:
        UserError: the file cannot be read or is not a space, or nothing is left to tune.
    """
    content = _with_optimizers(_read(path), str(path))
    known = fields(config_class)
    raw = {n: getattr(settings, n) for n in known if origin[n] != DEFAULT and n in known}
    raw = {n: v for n, v in raw.items() if n not in ("config", "host_config", "output")}
    wanted = None if params is None else [_name(p, known, "--params") for p in params.split(",")]
    for name in wanted or ():
        if name not in {_name(str(key), known, str(path)) for key in content}:
            raise UserError(f"--params: {name} is not in {path}; it has {', '.join(content)}")
    ranges: list[_Range] = []
    notes, fixed = [], []
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
        parts = entry if isinstance(entry, list) else [entry]
        for number, part in enumerate(parts, 1):
            where = f"{path}: {given}" + (f", range {number}" if len(parts) > 1 else "")
            key = f"{name}.{number}" if len(parts) > 1 else name
            one = _Range(name, key, where, part, known)
            its_own = "default" in part and not one.of_epochs and name not in raw
            if its_own and one.holds(effective(config_class, raw)):
                raw[name] = convert(known[name], part["default"], f"{where}: default")
            ranges.append(one)
    effective(config_class, raw).validate()
    made = _reachable(ranges, config_class, raw)
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


def _with_optimizers(content: Mapping, where: str) -> dict:
    """The content of a space with ranges in place of OF_OPTIMIZER. Raises UserError if no optimizer
    states a range for the setting."""
    expanded = {}
    for name, entry in content.items():
        parts = entry if isinstance(entry, list) else [entry]
        if OF_OPTIMIZER not in parts:
            expanded[name] = entry
        elif name == OPTIMIZER_FLAGS:
            for optimizer in OPTIMIZERS.values():
                for flag, ranges in optimizer.ranges.items():
                    if flag in optimizer.own:
                        expanded[flag] = [_as_in_a_file(one, {}) for one in ranges]
        else:
            setting = canonical_name(str(name))
            # Each names one optimizer only, so that a new one changes nothing in others' studies.
            stated = [
                _as_in_a_file(one, {"optimizer": optimizer})
                for optimizer, its in OPTIMIZERS.items()
                for one in its.ranges.get(setting, ())
            ]
            if not stated:
                raise UserError(f"{where}: {name}: of: optimizer: no optimizer states a range")
            expanded[name] = [
                one for part in parts for one in (stated if part == OF_OPTIMIZER else [part])
            ]
    return expanded


def _as_in_a_file(one: Range, when: dict) -> dict:
    """A range as in a space file; `when`: settings with which it applies, added to its own."""
    when = when | dict(one.when)
    return {"low": one.low, "high": one.high, "scale": one.scale, "grid": [*one.grid], "when": when}


def _name(given: str, known: Mapping, where: str) -> str:
    name = canonical_name(given.strip())
    if name not in known:
        raise UserError(f"{where}: unknown setting {given!r}{suggestion(given, known)}")
    return name


class _Range:
    """A range of the file, or the choices in place of one.

    Args:
        name: of the setting; `key`: that of the range in the study.
        where: the file and key, printed in messages.
        entry: the YAML below the setting.
        known: settings of the entry script.

    Attributes:
        when: setting -> the values with which it holds.
        of_epochs: its numbers are fractions of the run's epochs.

    Raises:
        UserError: a key is unknown, or a condition is wrong.
    """

    def __init__(self, name: str, key: str, where: str, entry, known: Mapping):
        self.name, self.key, self.where, self.field = name, key, where, known[name]
        if not isinstance(entry, Mapping):
            raise UserError(f"{where}: low, high and scale, or choices, are needed below it")
        for word in entry:
            if word not in KEYS:
                near = difflib.get_close_matches(str(word), KEYS, n=1, cutoff=0.5)
                hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(KEYS)}"
                raise UserError(f"{where}: unknown key {word!r}{hint}")
        if entry.get("of", "epochs") != "epochs":
            raise UserError(f"{where}: of: {entry['of']!r} is not epochs")
        self.entry, self.of_epochs = entry, "of" in entry
        when = {} if entry.get("when") is None else entry["when"]
        if not isinstance(when, Mapping):
            raise UserError(f"{where}: when: 'setting: value' is needed, as in {{optimizer: sgd}}")
        self.when = {}
        for given, wanted in when.items():
            other = _name(str(given), known, f"{where}: when")
            self.when[other] = tuple(
                convert(known[other], one, f"{where}: when: {given}")
                for one in (wanted if isinstance(wanted, list) else [wanted])
            )

    def holds(self, settings: Config) -> bool:
        return all(getattr(settings, name) in values for name, values in self.when.items())

    def value(self, given, word: str):
        """`given` below `word` in the file, as a value of the setting."""
        if given is None:
            raise UserError(f"{self.where}: {word} is missing")
        if not self.of_epochs:
            return convert(self.field, given, f"{self.where}: {word}")
        with contextlib.suppress(TypeError, ValueError):
            if 0 <= (fraction := float(given)) <= 1:
                return fraction
        raise UserError(f"{self.where}: {word} {given!r} is not a fraction of the epochs, 0 to 1")

    def parameter(self, recipe: Config, own_default: bool) -> Parameter:
        """Returns the Parameter of this range.

        Args:
            recipe: the settings under which it holds.
            own_default: its default is that of the file, not of the recipe.

        Raises:
            UserError: the range is wrong.
        """
        entry = self.entry
        default = getattr(recipe, self.name)
        if self.of_epochs:
            default = round((default or 0) / recipe.epochs, DIGITS)
        if own_default:
            default = self.value(entry["default"], "default")
        grid = entry.get("grid") or []
        if not isinstance(grid, list):
            raise UserError(f"{self.where}: grid: a list such as [0.1, 0.2] is needed")
        grid = tuple(self.value(point, "grid") for point in grid)
        return self._choices(default, grid) if "choices" in entry else self._numbers(default, grid)

    def _choices(self, default, grid: tuple) -> Parameter:
        entry, where, given = self.entry, self.where, self.entry["choices"]
        if {"low", "high", "scale"} & {*entry} or not isinstance(given, list) or len(given) < 2:
            raise UserError(f"{where}: choices is a list of two or more, without low, high, scale")
        choices = tuple(None if c is None else self.value(c, "choices") for c in given)
        if default not in choices:
            choices += (default,)
        return Parameter(
            name=self.name, key=self.key, low=None, high=None, scale="choice", choices=choices,
            default=default, grid=grid or choices, when=self.when, of_epochs=self.of_epochs,
        )  # fmt: skip

    def _numbers(self, default, grid: tuple) -> Parameter:
        entry, where = self.entry, self.where
        scale = entry.get("scale", "linear")
        if scale not in SCALES:
            raise UserError(f"{where}: scale {scale!r} is not one of {', '.join(SCALES)}")
        low, high = (self.value(entry.get(end), end) for end in ("low", "high"))
        if isinstance(low, (str, bool)):
            raise UserError(f"{where}: --{self.name} is not a number: give choices")
        if not low < high:
            raise UserError(f"{where}: low {low:g} is not below high {high:g}")
        if scale == "log" and low <= 0:
            raise UserError(f"{where}: scale log needs low above 0, not {low:g}")
        integer = scale == "int" or isinstance(low, int)
        if integer and not (float(low).is_integer() and float(high).is_integer()):
            raise UserError(f"{where}: scale int needs whole numbers, not {low:g} and {high:g}")
        for point in grid:
            if not low <= point <= high:
                raise UserError(
                    f"{where}: grid point {point:g} lies outside of {low:g} to {high:g}"
                )
        note = ""
        if default is None or (scale == "log" and default <= 0):
            note = f"{OUT_OF_REACH}{where}: the recipe has {default}, which no range of scale "
            note += f"{scale} contains: give a default, or choices: [{default}, ...]"
            default = low
        elif not low <= default <= high:
            low, high = min(low, default), max(high, default)
            note = f"{self.name}: its range is widened to {low:g} to {high:g}, to include the "
            note += "recipe's own"
        return Parameter(
            name=self.name, key=self.key, low=low, high=high, scale=scale, choices=(),
            default=default, grid=grid, when=self.when, of_epochs=self.of_epochs, integer=integer,
            note=note,
        )  # fmt: skip


def _reachable(ranges: list[_Range], config_class: type[Config], raw: dict) -> list[Parameter]:
    """The ranges that a trial can use. The key of a setting's only remaining range loses its
    number."""
    base, left = effective(config_class, raw), []
    settled = set()  # settings with a range that holds in every trial

    def can_be(name: str, value) -> bool:
        """Whether a trial has this value when a range is proposed: settings come in order."""
        before = [one for one in left if one.name == name]
        return getattr(base, name) == value or any(one.contains(value) for one in before)

    for one in ranges:
        possible = {n: [v for v in values if can_be(n, v)] for n, values in one.when.items()}
        if one.name in settled or not all(possible.values()):
            continue
        if not {other.name for other in left} & {*one.when}:
            settled.add(one.name)
        # The settings under which a range holds that does not hold for the recipe: its default may
        # depend on them.
        holds = one.holds(base)
        elsewhere = {} if holds else {n: values[0] for n, values in possible.items()}
        recipe = effective(config_class, raw | elsewhere)
        try:
            recipe.validate()
        except UserError as error:
            raise UserError(f"{one.where}: {error}") from None
        may_differ = (one.of_epochs or not holds) and one.name not in raw
        left.append(one.parameter(recipe, own_default="default" in one.entry and may_differ))
    names = [one.name for one in left]
    return [
        dataclasses.replace(one, key=one.name if names.count(one.name) == 1 else one.key)
        for one in left
    ]
