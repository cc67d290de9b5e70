"""Spaces and recipes in tests, without a search."""

import resnet50_test
from tuning.entry import target_of
from tuning.flags import for_trials
from tuning.halving import Rung
from tuning.recipe import Recipe
from tuning.space import Parameter, Space
from tuning.space_file import load_space
from utils.settings.config import fields, parse

RESNET50, TRANSFORMER = target_of("resnet50"), target_of("transformer")
RUNGS = [Rung(2, 0.1), Rung(10, 0.2)]


def space_of(path, *flags, target=RESNET50):
    """(Space, raw, notes) as read by a search."""
    settings, origin = parse(target.search_class, for_trials(list(flags)), "")
    known = fields(target.settings_class)
    base = target.settings_class(**{name: getattr(settings, name) for name in known})
    origin = {name: origin[name] for name in known}
    return load_space(path, target.settings_class, base, origin, settings.params)


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
