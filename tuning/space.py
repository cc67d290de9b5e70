"""What is tuned: parameters with their ranges, and what they propose to a trial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from utils.errors import UserError
from utils.settings.config import Config, fields

DIGITS = 4  # significant digits of a proposed number, so that recipes are easy to read


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One setting that is tuned.

    Attributes:
        name: of the setting.
        key: its name in the study: the setting's, followed by a number if the space has several
            ranges for it.
        low, high: ends of the range; None with `choices`.
        scale: "log", "linear", "int"; "choice" with `choices`.
        default: where the search begins; in the range.
        grid: points of --sampler grid.
        when: setting -> the values with which this range holds.
        of_epochs: the value is a fraction of the run's epochs.
        integer: the setting is a whole number, on whatever scale.
        note: for the user, if the range was changed or cannot be used.
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
    integer: bool = False
    note: str = ""

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

    def contains(self, value) -> bool:
        if self.scale == "choice":
            return value in self.choices
        return value is not None and self.low <= value <= self.high

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
        raw: the settings of the base recipe that are not the entry's defaults.
    """

    def __init__(self, parameters: list[Parameter], config_class: type[Config], raw: dict):
        self.parameters, self.config_class, self.raw = parameters, config_class, raw

    def propose(self, take) -> dict:
        """{setting: value} of the parameters that apply, with `take(parameter)` for the value; a
        parameter applies if its `when` holds and it has an effect with the values before it."""
        values = {}
        for parameter in self.parameters:
            if parameter.name not in values and self._applies(parameter, values):
                values[parameter.name] = take(parameter)
        return values

    def suggest(self, trial) -> dict:
        return self.propose(lambda parameter: parameter.suggest(trial))

    def title(self, name: str) -> str:
        """A setting's name in a table or line, with what its value is a fraction of."""
        of_epochs = any(one.of_epochs for one in self.parameters if one.name == name)
        return f"{name}/epochs" if of_epochs else name

    def ends_there(self, parameter: Parameter, end: float) -> bool:
        """Whether no range of this setting can be wider at that end."""
        limits = fields(self.config_class)[parameter.name].metadata
        if parameter.of_epochs:
            return end in (0, 1)
        return end in (limits["low"], limits["high"])

    def line(self, values: Mapping) -> str:
        """The settings of a trial, as text."""
        return ", ".join(f"{self.title(name)} {shown(value)}" for name, value in values.items())

    def defaults(self) -> dict:
        """{key: value} of the first trial."""
        return {parameter.key: parameter.default for parameter in self.parameters}

    def grid(self) -> list[dict]:
        """{key: value} of every combination of grid points, each of the parameters that apply with
        its values. UserError if one of these has no grid points."""
        return list(self._points(0, {}, {}))

    def _points(self, index: int, values: dict, point: dict) -> Iterator[dict]:
        """The grid from parameter `index` on; `values` (by setting) and `point` (by key) are those
        of the parameters before it."""
        for later, parameter in enumerate(self.parameters[index:], index + 1):
            if parameter.name in values or not self._applies(parameter, values):
                continue
            if not parameter.grid:
                raise UserError(
                    f"--sampler grid: {parameter.name} has no grid points in the space; add "
                    "'grid: [...]', or leave it out by --params"
                )
            for value in parameter.grid:
                chosen = values | {parameter.name: value}
                yield from self._points(later, chosen, point | {parameter.key: value})
            return
        yield point

    def _applies(self, parameter: Parameter, values: dict) -> bool:
        # Its own value matters: some settings have no effect only if they are given.
        value = parameter.default if parameter.high is None else parameter.high
        settings = effective(self.config_class, self.raw | values)
        for name, wanted in parameter.when.items():
            if getattr(settings, name) not in wanted:
                return False
        setattr(settings, parameter.name, value)
        return parameter.name not in settings.without_effect()


def shown(value) -> str:
    """A setting's value in a table or plot."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def effective(config_class: type[Config], values: Mapping) -> Config:
    """Settings with these values, and defaults for the others; not checked against each other."""
    defaults = {name: field.default for name, field in fields(config_class).items()}
    return config_class(**defaults | dict(values))
