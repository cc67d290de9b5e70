"""What is measured in the evaluations of a run."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .. import user_files
from ..errors import UserError
from ..exchange import Exchange
from .compute import value_of
from .table import MEASURES, Measure, measure_of, top_k
from .tally import Counts

# Without --metrics: macro F1 from this ratio of the largest class to the smallest, top-5 accuracy
# from this number of classes.
UNEQUAL, MANY = 1.5, 100
# Keys of a record in metrics.jsonl, which no measure of the user's may have as its name.
TAKEN = ("step", "epoch", "split", "samples", "model", "event", "average_over", "lr")


def usual_measures(labels: np.ndarray, classes: int) -> list[str]:
    """What is shown beside loss and accuracy if nobody asks for more.

    Args:
        labels: of the training split, (samples,) int64.
        classes: their number.
    """
    counts = np.bincount(labels, minlength=classes)
    unequal = counts.max() > UNEQUAL * max(1, counts.min())
    return ["f1_macro"] * bool(unequal) + [top_k(5).name] * (classes >= MANY)


def own_measure(place: str) -> Measure:
    """The measure of the user's own that "path/to/file.py:name" names.

    The function takes the true classes (samples,) int64 and the probabilities (samples, classes)
    float32, NumPy arrays, and returns a number. Larger values are better, unless the function has
    an attribute `greater_is_better` that is False.

    Raises:
        UserError: it cannot be found.
    """
    function = user_files.find("measure", place, "function", "my_measure", callable)
    name = place.rpartition(":")[2]

    def compute(targets, probabilities) -> float:
        return user_files.attempt(
            lambda: float(function(targets, probabilities)),
            f"measure {place}",
            place,
            "it takes the true classes (samples,) and the probabilities (samples, classes)",
        )

    rises = bool(getattr(function, "greater_is_better", True))
    return Measure(name, name.replace("_", " "), "scores", rises, compute=compute)


class Measures:
    """What is measured beside the mean loss.

    Args:
        classes: their number.
        names: of measures, as `canonical_name` returns them; loss and accuracy, which are always
            measured, are left out.

    Raises:
        UserError: a file with a measure of the user's cannot be read, or its name is taken; or a
            top-k accuracy is always 100 %.
    """

    def __init__(self, classes: int, names: Collection[str] = ()):
        self.classes = classes
        self.further: list[Measure] = []
        for name in names:
            if name in ("loss", "accuracy"):
                continue
            measure = own_measure(name) if ":" in name else measure_of(name)
            taken = {*TAKEN, *MEASURES, *names, *(other.name for other in self.further)}
            if ":" in name and measure.name in taken:
                raise UserError(
                    f"measure {name}: another measure or entry of metrics.jsonl has this name; "
                    "give the function another one"
                )
            if measure.k >= classes:
                raise UserError(
                    f"measure {name}: with {classes} classes it is always 100 %: leave it out, or "
                    "take a smaller k"
                )
            self.further.append(measure)

    def measure(self, name: str) -> Measure:
        """The one that --best_by `name` means."""
        known = {measure.name: measure for measure in self.further}
        return known.get(name.rpartition(":")[2]) or measure_of(name)

    def values(self, counts: Counts, exchange: Exchange) -> dict[Measure, float | None]:
        """Those of rank 0, as ranks may differ in the last bits. Collective. Raises UserError if a
        function of the user's fails, which it then does on all ranks."""
        values = [value_of(measure, counts) for measure in self.further]
        if values:
            values = exchange.gather_json(values)[0]
        return dict(zip(self.further, values, strict=True))
