"""Evaluation: every sample once, in evaluation mode, by counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..exchange import Exchange
from ..machine.backends import search_plans
from ..measures.compute import Interval, interval_of, wilson_interval
from ..measures.measures import Measures
from ..measures.outcomes import Outcomes
from ..measures.table import MEASURES, Measure
from ..measures.tally import Counts, Tally
from .objective import SUMS, Precision, classification_sums, figures, stacked
from .views import mean_log_probabilities


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean cross-entropy, without label smoothing
    accuracy: float  # per cent
    samples: int
    # Loss and accuracy of the mean probabilities over `views`
    views_loss: float | None = None
    views_accuracy: float | None = None
    # Values of further measures (None: undefined), and the counts that they are made of.
    further: dict[Measure, float | None] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)
    outcomes: Outcomes | None = None  # the answer to each sample, where they were recorded

    @property
    def figures(self) -> dict:
        """For the metrics and the summary."""
        known = {"loss": self.loss, "accuracy": self.accuracy, "samples": self.samples}
        return known | {measure.name: value for measure, value in self.further.items()}

    def intervals(self) -> dict[str, Interval]:
        """{name: 95 % interval}; of further measures computed here, in up to some seconds."""
        found = {m.name: interval_of(m, self.counts) for m in self.further if self.counts}
        known = {name: interval for name, interval in found.items() if interval is not None}
        return {"accuracy": self._accuracy_interval} | known

    @property
    def _accuracy_interval(self) -> Interval:
        return wilson_interval(self.accuracy / 100 * self.samples, self.samples)

    @property
    def views_figures(self) -> dict:
        """For the summary; empty without `views`."""
        if self.views_accuracy is None:
            return {}
        return {"loss": self.views_loss, "accuracy": self.views_accuracy}

    def in_words(self, intervals: dict[str, Interval] | None = None) -> str:
        """The accuracy and the further measures, with their intervals if these are given; else only
        the accuracy with its own."""
        intervals = intervals or {"accuracy": self._accuracy_interval}
        values = {MEASURES["accuracy"]: self.accuracy} | self.further
        return ", ".join(m.text(value, intervals.get(m.name)) for m, value in values.items())


def evaluate(
    model: nn.Module,
    batches: Iterable,
    precision: Precision,
    interrupted: Callable[[], bool] = lambda: False,
    measures: Measures | None = None,
    exchange: Exchange | None = None,
    views: str = "none",
    outcomes: Outcomes | None = None,
) -> Evaluation | None:
    """Mean loss and accuracy of `model` over `batches`, each sample counted once.

    The host reads the sums once, at the end. Returns None if `interrupted()` has become true. With
    `measures` these are measured as well. With an `exchange` each rank passes its own batches, as
    many as the others, and the counts are of all ranks. With `views` the inputs are pictures, and
    further forward passes of each batch take other views of them (see views.py). With `outcomes`
    they record the answers.
    """
    exchange = exchange or Exchange()
    training = model.training
    model.eval()
    search_plans(False)  # the trainer decides again for each of its micro-batches
    # Of the samples as they are, and averaged over views.
    sums = torch.zeros(2, len(SUMS), dtype=torch.float64, device=precision.device)
    tally = None
    if measures is not None:
        tally = Tally(measures.classes, precision.device, measures.further)
    try:
        # Not inference_mode: weights that FSDP gathers in the forward pass, or what a model of the
        # user's keeps of it, are needed in training.
        with torch.no_grad():
            for batch in batches:
                if interrupted():
                    return None
                with precision.autocast():
                    logits = model(batch.inputs)
                    if views != "none":
                        log_p = mean_log_probabilities(model, batch.inputs, logits, views)
                if exchange.size > 1 and batch.filler:
                    continue
                loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
                sums[0] += stacked(classification_sums(loss, logits, batch.targets), SUMS)
                if views != "none":
                    loss = F.nll_loss(log_p, batch.targets, reduction="sum")
                    sums[1] += stacked(classification_sums(loss, log_p, batch.targets), SUMS)
                if tally is not None:
                    tally.add(logits, batch.targets)
                if outcomes is not None:
                    outcomes.add(logits, batch.targets)
    finally:
        model.train(training)
    values = exchange.sum(sums).tolist()
    plain, averaged = (dict(zip(SUMS, row, strict=True)) for row in values)
    if outcomes is not None:
        outcomes.finish()
    result = Evaluation(**figures(plain), samples=int(plain["samples"]), outcomes=outcomes)
    if measures is not None and tally is not None:
        counts = tally.counts(exchange)
        result = replace(result, further=measures.values(counts, exchange), counts=counts)
    if views == "none":
        return result
    mean = figures(averaged)
    return replace(result, views_loss=mean["loss"], views_accuracy=mean["accuracy"])
