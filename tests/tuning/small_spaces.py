"""Spaces and recipes in tests, without a search."""

import resnet50_test
from tuning import resnet50_tuning
from tuning.flags import for_trials
from tuning.halving import Rung
from tuning.recipe import Recipe
from tuning.space import Parameter, Space
from tuning.space_file import load_space
from utils.settings.config import fields, parse

RUNGS = [Rung(2, 0.1), Rung(10, 0.2)]


def space_of(path, *flags, tuning=resnet50_tuning):
    """(Space, raw, notes) as read by a search."""
    settings, origin = parse(tuning.Settings, for_trials(list(flags)), "")
    known = fields(tuning.TARGET.config_class)
    base = tuning.TARGET.config_class(**{name: getattr(settings, name) for name in known})
    origin = {name: origin[name] for name in known}
    return load_space(path, tuning.TARGET.config_class, base, origin, settings.params)


def tuned(space):
    return space.propose(lambda parameter: parameter.default)


def parameter(name, low, high, default, **more):
    given = {"scale": "linear", "choices": (), "grid": (), "when": {}, "of_epochs": False}
    given |= {"integer": False} | more
    return Parameter(name, name, low, high, default=default, **given)


def recipe_of(flags, batch=None, parameters=(), rungs=RUNGS, subset=1.0):
    settings, origin = parse(resnet50_test.Settings, flags, "")
    raw = {name: getattr(settings, name) for name, came in origin.items() if came != "default"}
    space = Space([*parameters], resnet50_test.Settings, raw)
    return Recipe(space, rungs, 0.2, batch, subset)
