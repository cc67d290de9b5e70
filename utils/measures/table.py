"""The measures by name, most as scikit-learn calls them; docs/measures.md explains them."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class Measure:
    """One figure of a model on a split.

    Attributes:
        name: in metrics.jsonl, in the summary (after "test_") and for --metrics.
        title: in lines and plots.
        of: what it is made of: "hits" (samples whose class is among the k likeliest), "confusions"
            (the confusion matrix), "calibration" (of the likeliest class), "scores" (the
            probabilities of all samples) or "loss".
        rises: larger is better.
        percent: it is told in per cent, else as a fraction.
    """

    name: str
    title: str
    of: str
    rises: bool = True
    percent: bool = False

    def is_better(self, value: float | None, than: float | None) -> bool:
        """None, which is undefined, is worse than any value."""
        if value is None or than is None:
            return value is not None
        return value > than if self.rises else value < than

    def to_fall(self, value: float | None) -> float:
        """What falls as the measure gets better, for a schedule."""
        if value is None:
            return math.inf
        return (100 if self.percent else 1) - value if self.rises else value

    def score(self, value: float) -> float:
        """0 to 100, larger for better: per cent; of the loss the probability of the right class in
        the geometric mean, of the calibration error its difference from 100 %."""
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

    def text(self, value: float | None) -> str:
        """ "macro F1 0.612"; a value of None is undefined."""
        if value is None:
            return f"{self.title} undefined"
        return f"{self.title} {value:.2f} %" if self.percent else f"{self.title} {value:.3f}"


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
        Measure("matthews_corrcoef", "Matthews correlation", "confusions"),
        Measure("calibration_error", "calibration error", "calibration", rises=False),
        Measure("roc_auc_ovr", "AUROC", "scores"),
        Measure("average_precision", "average precision", "scores"),
    )
}
OF_SKLEARN = {name for name, measure in MEASURES.items() if measure.of == "scores"}
OTHER_NAMES = {
    "acc": "accuracy",
    "eval_accuracy": "accuracy",
    "top1": "accuracy",
    "log_loss": "loss",
    "neg_log_loss": "loss",
    "eval_loss": "loss",
    "bal_acc": "balanced_accuracy",
    "f1": "f1_macro",
    "macro_f1": "f1_macro",
    "weighted_f1": "f1_weighted",
    "precision": "precision_macro",
    "recall": "recall_macro",
    "kappa": "cohen_kappa",
    "mcc": "matthews_corrcoef",
    "ece": "calibration_error",
    "auc": "roc_auc_ovr",
    "auroc": "roc_auc_ovr",
    "roc_auc": "roc_auc_ovr",
    "ap": "average_precision",
}
_TOP_K = re.compile(r"top_?(\d+)(_accuracy)?|acc(\d+)")


def top_k(k: int) -> Measure:
    """The accuracy that counts a sample if its class is among the `k` likeliest."""
    return Measure(f"top{k}_accuracy", f"top-{k} accuracy", "hits", percent=True)


def k_of(name: str) -> int:
    """Of a measure made of hits."""
    return 1 if name == "accuracy" else int(re.sub(r"\D", "", name))


def canonical_name(given: str, flag: str = "--metrics") -> str:
    """The name of the measure that `given` means, for example "f1_macro" of "macro_f1"; that of
    FILE.py:NAME is itself.

    Raises:
        UserError: there is no such measure; `flag` named it.
    """
    name = given.strip().lower()
    name = OTHER_NAMES.get(name, name)
    if ":" in given or name in MEASURES:
        return given.strip() if ":" in given else name
    if match := _TOP_K.fullmatch(name):
        k = int(match[1] or match[3])
        if k > 1:
            return top_k(k).name
        if k == 1:
            return "accuracy"
    known = [*MEASURES, "top5_accuracy"]
    near = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"{flag} {given}: {hint}the measures are {', '.join(known)}, and FILE.py:NAME")


def names_in(text: str | None) -> list[str]:
    """The measures in the value of --metrics: names separated by commas; "all" is all but accuracy
    and loss. Raises UserError."""
    given = [name for name in (text or "").split(",") if name.strip()]
    every = [name for name in MEASURES if name not in ("accuracy", "loss")]
    named = [every if name.strip() == "all" else [canonical_name(name)] for name in given]
    return [*dict.fromkeys(itertools.chain(*named))]


def is_known(name: str) -> bool:
    return name in MEASURES or _TOP_K.fullmatch(name) is not None


def measure_of(name: str) -> Measure:
    """The measure with a canonical name that is not FILE.py:NAME (see own.py)."""
    return MEASURES.get(name) or top_k(k_of(name))
