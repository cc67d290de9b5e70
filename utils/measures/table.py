"""The measures by name, most as scikit-learn calls them; docs/measures.md explains them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class Measure:
    """One figure of a model on a split.

    Attributes:
        name: in metrics.jsonl, in the summary (after "test_") and for --metrics.
        title: in lines and plots.
        of: what it is made of: "hits" (samples whose class is among the `k` likeliest),
            "confusions" (the confusion matrix), "calibration" (of the likeliest class), "scores"
            (the probabilities of all samples) or "loss".
        rises: larger is better.
        percent: it is told in per cent, else as a fraction.
        compute: the user's function of classes and probabilities (see `own_measure`).
    """

    name: str
    title: str
    of: str
    rises: bool = True
    percent: bool = False
    k: int = 1
    compute: Callable | None = None

    def score(self, value: float | None) -> float:
        """0 to 100, larger for better: per cent; of the loss the probability of the right class in
        the geometric mean, of the calibration error its difference from 100 %. None, which is
        undefined, is worse than any value."""
        if value is None:
            return -math.inf
        if self.rises:
            return value if self.percent else 100 * value
        return 100 * (math.exp(-value) if self.of == "loss" else 1 - value)

    @property
    def score_title(self) -> str:
        if self.rises:
            return self.title
        return "exp(-loss)" if self.of == "loss" else f"1 - {self.title}"

    @property
    def better_text(self) -> str:
        return f"{'better' if self.rises else 'lower'} {self.title}"

    def text(self, value: float | None, interval: tuple[float, float] | None = None) -> str:
        """ "macro F1 0.612 (0.580 to 0.640)"; a value of None is undefined."""
        if value is None:
            return f"{self.title} undefined"
        text = f"{self.title} {value:.2f} %" if self.percent else f"{self.title} {value:.3f}"
        if interval is None:
            return text
        low, high = (f"{end:.1f}" if self.percent else f"{end:.3f}" for end in interval)
        return f"{text} ({low} to {high})"


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("accuracy", "accuracy", "hits", percent=True),
        Measure("loss", "loss", "loss", rises=False),
        Measure("balanced_accuracy", "balanced accuracy", "confusions", percent=True),
        Measure("f1_macro", "macro F1", "confusions"),
        Measure("f1_weighted", "weighted F1", "confusions"),
        Measure("precision_macro", "macro precision", "confusions"),
        Measure("recall_macro", "macro recall", "confusions"),
        Measure("cohen_kappa", "Cohen's kappa", "confusions"),
        Measure("calibration_error", "calibration error", "calibration", rises=False),
        Measure("roc_auc_ovr", "AUROC", "scores"),
        Measure("average_precision", "average precision", "scores"),
    )
}
OF_SKLEARN = {name for name, measure in MEASURES.items() if measure.of == "scores"}
# What they are called in torchmetrics, AutoGluon, Hugging Face's Trainer and by scikit-learn's
# scorers, where that is not their name; ultralytics' accuracy_top5 is one of the top-k.
OTHER_NAMES = {
    "acc": "accuracy",
    "log_loss": "loss",
    "neg_log_loss": "loss",
    "f1": "f1_macro",
    "macro_f1": "f1_macro",
    "precision": "precision_macro",
    "recall": "recall_macro",
    "auroc": "roc_auc_ovr",
    "roc_auc": "roc_auc_ovr",
}
_TOP_K = re.compile(r"(?:top|acc|accuracy_top)_?([1-9]\d*)(?:_accuracy)?")


def top_k(k: int) -> Measure:
    """The accuracy that counts a sample if its class is among the `k` likeliest."""
    if k == 1:
        return MEASURES["accuracy"]
    return Measure(f"top{k}_accuracy", f"top-{k} accuracy", "hits", percent=True, k=k)


def measure_of(given: str, flag: str = "--metrics") -> Measure:
    """The measure that `given` means, for example f1_macro for "macro_f1".

    Raises:
        UserError: there is no such measure; `flag` named it.
    """
    name = given.strip().lower().removeprefix("eval_")  # of Hugging Face
    if match := _TOP_K.fullmatch(name):
        return top_k(int(match[1]))
    if found := MEASURES.get(OTHER_NAMES.get(name, name)):
        return found
    known = ", ".join([*MEASURES, "top5_accuracy"])
    raise UserError(f"{flag} {given}: the measures are {known}, and FILE.py:NAME")


def known_measure(name: str) -> Measure | None:
    """The measure with this key in records and summaries; None: there is none."""
    try:
        found = measure_of(name)
    except UserError:
        return None
    return found if found.name == name else None


def canonical_name(given: str, flag: str = "--metrics") -> str:
    """The name of the measure that `given` means; that of FILE.py:NAME is itself. Raises
    UserError, see `measure_of`."""
    return given.strip() if ":" in given else measure_of(given, flag).name


def names_in(text: str | None) -> list[str]:
    """The measures in the value of --metrics: names separated by commas; "all" is all but accuracy
    and loss. Raises UserError."""
    names: list[str] = []
    for name in filter(None, map(str.strip, (text or "").split(","))):
        every = [one for one in MEASURES if one not in ("accuracy", "loss")]
        names += every if name == "all" else [canonical_name(name)]
    return [*dict.fromkeys(names)]
