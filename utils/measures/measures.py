"""What is measured in the evaluations of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from ..errors import UserError
from ..exchange import Exchange
from .compute import Interval, interval_of, value_of
from .own import own_measure
from .table import Measure, canonical_name, is_known, k_of, measure_of, top_k
from .tally import Counts, Tally

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


class Measures:
    """What is measured beside the mean loss.

    Args:
        names: of measures, as `canonical_name` returns them; loss and accuracy, which are always
            measured, are left out.
        classes: their number.

    Raises:
        UserError: a file with a measure of the user's cannot be read.
    """

    def __init__(self, classes: int, names: Collection[str] = ()):
        self.classes = classes
        self._by_name: dict[str, Measure] = {}
        self._functions: dict[str, Callable] = {}  # of the measures of the user's
        for place in (name for name in names if ":" in name):
            measure, function = own_measure(place)
            if measure.name in TAKEN or is_known(measure.name) or measure.name in self._by_name:
                raise UserError(
                    f"measure {place}: another measure or entry of metrics.jsonl has this name; "
                    "give the function another one"
                )
            self._by_name[measure.name], self._functions[measure.name] = measure, function
        for name in names:
            if ":" not in name and name not in ("loss", "accuracy"):
                self._by_name[name] = measure_of(name)

    @property
    def further(self) -> list[Measure]:
        return [*self._by_name.values()]

    def measure(self, name: str) -> Measure:
        """The one that --best_by `name` means."""
        name = canonical_name(name).rpartition(":")[2]
        return self._by_name.get(name) or measure_of(name)

    def tally(self, device: torch.device, confusions: bool = False) -> Tally:
        """`confusions`: counts the confusion matrix even if no measure needs it."""
        sources = {measure.of for measure in self.further}
        top = [k_of(measure.name) for measure in self.further if measure.of == "hits"]
        return Tally(self.classes, device, sources | ({"confusions"} if confusions else set()), top)

    def values(self, counts: Counts, exchange: Exchange) -> dict[str, float | None]:
        """Those of rank 0, as ranks may differ in the last bits. Collective. Raises UserError if a
        function of the user's fails there."""
        values: dict[str, float | None] = {}
        failure = None
        try:
            for name in self._by_name if exchange.rank == 0 else ():
                if name in self._functions:
                    assert counts.scores is not None
                    values[name] = self._functions[name](*counts.scores)
                else:
                    values[name] = value_of(name, counts)
        except UserError as error:
            failure = str(error)
        if self._by_name:
            values, failure = exchange.gather_json([values, failure])[0]
        if failure is not None:
            raise UserError(failure)
        return values

    def intervals(self, counts: Counts) -> dict[str, Interval]:
        """The 95 % intervals, where there are any."""
        names = [name for name in self._by_name if name not in self._functions]
        found = {name: interval_of(name, counts) for name in names}
        return {name: interval for name, interval in found.items() if interval is not None}


def figures_text(measures: Sequence[Measure], values: dict, intervals: dict[str, Interval]) -> str:
    """ "accuracy 93.10 % (92.6 to 93.6), macro F1 0.612 (0.580 to 0.640)"."""
    texts = []
    for measure in measures:
        text = measure.text(values.get(measure.name))
        if interval := intervals.get(measure.name):
            digits = 1 if measure.percent else 3
            text += f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"
        texts.append(text)
    return ", ".join(texts)
