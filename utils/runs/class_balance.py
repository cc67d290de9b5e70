"""The training loss for classes that are not equal, as the settings ask for it."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten
from unicodedata import normalize

import numpy as np
import torch

from ..checkpoints.checkpoint import Checkpoint
from ..errors import UserError
from ..settings.classes import BY_COUNT
from ..settings.yaml_file import Loader, read_yaml_file
from ..tasks.task import Task
from ..training.class_balance import ClassBalance, own_loss
from .run import Run

# A line says so if the largest class has more than so many times the samples of the smallest.
NOTABLE_RATIO = 5


class AsText(Loader):
    """Leaves all values texts, as a class may be called yes, or 1e3."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012


def class_balance(run: Run, task: Task, checkpoint: Checkpoint | None) -> ClassBalance | None:
    """The loss; None: plain cross-entropy. In a new run, says what is notable of its classes.

    Raises:
        UserError: the file of weights is wrong, or has changed since the run was started; or a
            class whose weight or prior is to follow from its count has no training sample.
    """
    settings, classes, name = run.settings, task.card.classes, run.settings.class_weights
    if settings.loss is not None:
        return own_loss(settings.loss, len(classes), run.device)
    counts = np.bincount(task.train.labels.cpu().numpy(), minlength=len(classes))
    if not counts.all() and (name in BY_COUNT or settings.logit_adjustment):
        raise UserError(
            f"class {classes[int(counts.argmin())]!r} has no training sample, which "
            f"{settings.corrections_by_count[-1]} needs: add some, or remove the class"
        )
    weights = None if name is None else class_weights(name, counts, classes).to(run.device)
    shift = None
    if settings.logit_adjustment:
        log_prior = np.log(counts / counts.sum())
        shift = torch.from_numpy(settings.logit_adjustment * log_prior).float().to(run.device)
    if checkpoint is None:
        for line in notes(settings, counts, classes):
            run.console.say(f"note: {line}")
    if weights is not None and (weights == 1).all():
        run.console.say(f"note: --class_weights {name}: all classes weigh the same, as without it")
        weights = None
    balance = ClassBalance(settings.label_smoothing, weights, settings.focal_gamma, shift)
    now = balance.run_info.get("class_weights")
    if checkpoint is not None and checkpoint.run_info.get("class_weights") != now:
        raise UserError(
            f"--class_weights {name}: the run was started with other weights; put the old ones "
            "back, or start a new run"
        )
    is_plain = weights is None and shift is None and not settings.focal_gamma
    return None if is_plain else balance


def class_weights(name: str, counts: np.ndarray, classes: Sequence[str]) -> torch.Tensor:
    """(classes,) float32: what `--class_weights` asks for, scaled so that the mean over the
    training samples is 1. That leaves weighted means as they are, and gradients in fp16's range.
    With balanced they are thus those of scikit-learn, samples / (classes * count).

    Args:
        counts: (classes,) int64, training samples of each class.
    """
    by_count = {"balanced": counts, "sqrt": np.sqrt(counts)}
    weights = 1 / by_count[name] if name in by_count else read_weights(Path(name), classes)
    mean = weights @ counts / counts.sum()
    if mean == 0:
        raise UserError(f"--class_weights {name}: give a class with training samples more than 0")
    return torch.from_numpy(weights / mean).float()


def read_weights(path: Path, classes: Sequence[str]) -> np.ndarray:
    """(classes,) float64: the weights in a YAML file of the user.

    Raises:
        UserError: it cannot be read, does not have each class, or a weight is not a finite number
            of 0 or more.
    """
    flag, found = f"--class_weights {path}", read_yaml_file(path, "--class_weights", AsText)
    if not isinstance(found, dict):
        raise UserError(f"{flag}: a line for each class is needed, as in cat: 2.5")
    given = {normalize("NFC", str(name)): text for name, text in found.items()}
    known = {normalize("NFC", name): name for name in classes}
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"{flag}: there is no class {unknown[0]!r}; there are {_names(classes)}")
    if missing := [known[name] for name in known if name not in given]:
        raise UserError(f"{flag}: there is no weight for {_names(missing)}; add a line for each")
    weights = []
    for name in known:
        try:
            weights.append(float(given[name]))
        except (TypeError, ValueError):  # YAML may have a list
            weights.append(math.nan)
        if not 0 <= weights[-1] < math.inf:
            weight = f"the weight of {known[name]!r} is {given[name]!r}"
            raise UserError(f"{flag}: {weight}; give a number, 0 or more")
    return np.array(weights)


def _names(classes: Sequence[str]) -> str:
    return shorten(", ".join(map(repr, classes)), 80, placeholder=" ...")


def notes(settings, counts: np.ndarray, classes: Sequence[str]) -> Iterable[str]:
    """Lines for a new run."""
    by_count = settings.corrections_by_count
    if len(by_count) > 1:
        yield (
            f"each of {' and '.join(by_count)} corrects for how many samples a class has, so "
            "together they correct too much: keep one of them"
        )
    uses_none = not (by_count or settings.class_weights or settings.focal_gamma)
    smallest = int(np.where(counts > 0, counts, counts.max()).argmin())
    largest = int(counts.argmax())
    if uses_none and counts[largest] > NOTABLE_RATIO * counts[smallest]:
        yield (
            f"class {classes[largest]!r} has {counts[largest]:,} training samples and class "
            f"{classes[smallest]!r} {counts[smallest]:,}: so that small classes count for more, "
            "try --class_sampler balanced, then --class_weights sqrt"
        )
