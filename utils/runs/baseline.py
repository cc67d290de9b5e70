"""What simple methods reach on the split that a run is measured on, beside its result: the largest
class always, and logistic regression (utils/tasks/simple_models.py)."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import torch

from ..data.images.decoded import kept
from ..data.splits import stratified_order
from ..errors import UserError, one_line
from ..files import file_sum
from ..machine.packages import left_out, version_of
from ..measures.measures import Measures, usual_measures
from ..measures.table import MEASURES
from ..training.evaluation import Evaluation, evaluate
from ..training.objective import Precision
from ..training.trainer import Trainer
from .prepare import Ready
from .run import Run

MOST, LEAST = 20_000, 500  # samples that logistic regression is trained on
FRACTION = 0.02  # of the run's time that it may take
# Of importing scikit-learn, and of texts that are read again, on a slow machine.
IMPORT_SECONDS, BYTES_PER_SECOND = 2.0, 4e6
SAFETY = 1.5  # a fit may take so many times the time of a smaller one, for as many samples
CHUNK = 1024  # samples that are classified at a time
LOWEST = 1e-15  # is added to probabilities, so that the loss stays finite

Predict = Callable[[np.ndarray], np.ndarray]  # (n,) samples -> (n, classes) probabilities


def compare(
    run: Run, trainer: Trainer, ready: Ready, result: Evaluation, split: str
) -> tuple[dict, str]:
    """Measures the baselines on the split that gave the result, if that is asked for and this rank
    leads, and says what they reach. To be called after the last collective.

    Returns entries of the summary, and for the run's last line that a baseline is better, or "".
    """
    if run.watch is not None and run.leads:
        run.watch.close()  # the other ranks are done, and this one takes its time
    if not (run.settings.baseline and run.leads):
        return {}, ""
    measures, model = ready.measures, ready.task.simple_model
    found: dict[str, dict | None] = {"baseline": None, "majority": None}
    baselines = Baselines(model, measures, split, spare_seconds(trainer))
    missing = ""
    try:
        found["majority"] = baselines.majority()
        if note := left_out("scikit-learn", "baselines by logistic regression"):
            run.console.say(note)
        else:
            own = ":" in f"{run.settings.metrics},{run.settings.best_by}"  # they may change
            found["baseline"] = baselines.fitted(None if own else Path(run.settings.cache_dir))
    except Exception as error:  # whatever it is, it costs the baseline and not the run its report
        why = one_line(error if isinstance(error, UserError) else repr(error), 200)
        missing = f" ({model.title} is left out: {why})"
    by = trainer.plan.best_by or MEASURES["f1_macro" if baselines.unequal else "accuracy"]
    best, better, texts = result.figures.get(by.name), None, []
    for one in filter(None, found.values()):
        if best is not None and by.score(one[by.name]) > by.score(best):
            best, better = one[by.name], one["name"]
        shown = MEASURES["accuracy"], *measures.further
        told = [each.text(one[each.name], one["intervals"].get(each.name)) for each in shown]
        texts.append(", ".join([one["name"], *told]))
    run.console.say(f"baseline: {'; '.join(texts) or 'none'}{missing}")
    verdict = "" if better is None else f"; a baseline is better: {better}, {by.text(best)}"
    return found | {"baseline_wins": better is not None}, verdict


def spare_seconds(trainer: Trainer) -> float:
    """That a baseline may take, or a search for near copies; of a time budget what is left."""
    seconds, budget = FRACTION * trainer.clock.seconds_total, trainer.time_budget
    return seconds if budget is None else min(seconds, budget.left - budget.report.seconds)


class Baselines:
    """The model, of simple_models.py, is fitted within `budget` seconds, and measured on the
    split."""

    def __init__(self, model, measures: Measures, split: str, budget: float):
        self.model, self.measures, self.split, self.budget = model, measures, split, budget
        self.labels, self.targets = (model.splits[name].labels for name in ("train", split))
        self.unequal = "f1_macro" in usual_measures(self.labels, measures.classes)
        self.wanted = min(MOST, len(self.labels))

    def majority(self) -> dict:
        """The largest class always, with the fractions of all classes as probabilities."""
        p = np.bincount(self.labels, minlength=self.measures.classes) / len(self.labels)
        result = self._measured(lambda index: np.tile(p, (len(index), 1)))
        entry = {"name": "the largest class always", "train_samples": len(self.labels)}
        return entry | result.figures | {"intervals": {}}

    def fitted(self, cache: Path | None) -> dict:
        """The model fitted, from the folder `cache` if it is there. Raises what it fails by."""
        if cache is None:
            return self._read(self._fitted())
        names = [measure.name for measure in self.measures.further]
        model, content = self.model, [version_of("scikit-learn"), self.split, names]
        content += [model.title, model.identity, [file_sum(path) for path in model.files]]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return kept(cache / f"baseline-{key[:16]}.json", self._fitted, self._read)

    def _fitted(self) -> list:
        samples, predict = self._fit_in_time()
        result = self._measured(predict)
        part = f" trained on {samples:,} samples" * (samples < len(self.labels))
        entry = {"name": self.model.title + part, "train_samples": samples} | result.figures
        return [entry | {"intervals": result.intervals()}, self.budget]

    def _read(self, cached: list) -> dict:
        entry, budget = cached
        if entry["train_samples"] < self.wanted and self.budget > 2 * budget:
            raise ValueError("this run has time for a better one")
        return entry

    def _fit_in_time(self) -> tuple[int, Predict]:
        """(training samples, predictions) of the model, fitted to as many as there is time for.
        UserError: it would take too long."""
        end = time.monotonic() + self.budget
        few, part = min(LEAST, self.wanted), np.arange(min(LEAST, len(self.targets)))
        size = sum(path.stat().st_size for path in self.model.files)
        seconds = IMPORT_SECONDS + size / BYTES_PER_SECOND
        if seconds <= self.budget:
            resolve_name(self.model.features)  # imports scikit-learn
            self.model.inputs("train", part[:1])
            order, start = stratified_order(self.labels, seed=0), time.monotonic()
            predict, middle = self._fit(order[:few]), time.monotonic()
            predict(part)
            seconds = (time.monotonic() - middle) / len(part) * len(self.targets)
        left = end - time.monotonic() - seconds
        if left < 0:
            raise UserError(f"it would take more than {100 * FRACTION:g} % of the run's time")
        samples = min(self.wanted, int(few * left / (SAFETY * (middle - start))))
        return (few, predict) if samples <= few else (samples, self._fit(order[:samples]))

    def _fit(self, index: np.ndarray) -> Predict:
        """Predictions on the split, by the model fitted to the training samples `index`."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        model, index, weight = self.model, np.sort(index), "balanced" if self.unequal else None
        classifier = LogisticRegression(max_iter=model.iterations, class_weight=weight)
        fitted = make_pipeline(resolve_name(model.features)(), classifier)
        # With one thread the figures do not depend on the machine's cores.
        with warnings.catch_warnings(action="ignore"), threadpool_limits(1, "blas"):
            fitted.fit(model.inputs("train", index), self.labels[index])

        def predict(samples: np.ndarray) -> np.ndarray:
            p = np.zeros((len(samples), self.measures.classes))
            p[:, fitted.classes_] = fitted.predict_proba(model.inputs(self.split, samples))
            return p

        return predict

    def _measured(self, predict: Predict) -> Evaluation:
        labels, precision = torch.tensor(self.targets), Precision("fp32", torch.device("cpu"))
        parts = torch.arange(len(labels)).split(CHUNK)
        logits = (torch.from_numpy(predict(part.numpy()) + LOWEST).log() for part in parts)
        pairs = zip(logits, labels.split(CHUNK), strict=True)
        batches = (SimpleNamespace(inputs=inputs, targets=targets) for inputs, targets in pairs)
        return evaluate(torch.nn.Identity(), batches, precision, measures=self.measures)
