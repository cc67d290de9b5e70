"""Measures of the user's own, named as FILE.py:NAME."""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import user_files
from ..errors import UserError
from .table import Measure


def own_measure(place: str) -> tuple[Measure, Callable]:
    """(the measure, its function) that "path/to/file.py:name" names.

    The function takes the true classes (samples,) int64 and the probabilities (samples, classes)
    float32, NumPy arrays, and returns a number. Larger values are better, unless the function has
    an attribute `greater_is_better` that is False.

    Raises:
        UserError: it cannot be found.
    """
    function = user_files.find("measure", place, "function", "my_measure")
    if not callable(function):
        file, _, name = place.rpartition(":")
        there = user_files.own_names(place)
        raise UserError(f"measure {place}: {file} has no function {name}{there}")
    name = place.rpartition(":")[2]
    rises = bool(getattr(function, "greater_is_better", True))

    def compute(targets, probabilities) -> float | None:
        try:
            value = float(function(targets, probabilities))
        except Exception as error:
            raise UserError(
                f"measure {place} failed{user_files.where(error, place)}; it takes the true "
                "classes (samples,) and the probabilities (samples, classes)"
            ) from None
        return value if math.isfinite(value) else None

    return Measure(name, name.replace("_", " "), "scores", rises), compute
