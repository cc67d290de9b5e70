"""Evaluation: every sample once, in evaluation mode, by counts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..exchange import Exchange
from ..machine.backends import search_plans
from .objective import SUMS, Precision, classification_sums, figures, stacked


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean cross-entropy, without label smoothing
    accuracy: float  # per cent
    samples: int
    # (classes, classes) int64 where it was asked for: rows are the classes, columns what the
    # model took them for
    confusion: np.ndarray | None = None
    # Loss and accuracy of the mean probabilities of each picture and its mirror image (`flip`)
    flip_loss: float | None = None
    flip_accuracy: float | None = None

    @property
    def figures(self) -> dict:
        """For the metrics and the summary."""
        return {"loss": self.loss, "accuracy": self.accuracy, "samples": self.samples}

    @property
    def flip_figures(self) -> dict:
        """For the summary; empty without `flip`."""
        if self.flip_accuracy is None:
            return {}
        return {"loss": self.flip_loss, "accuracy": self.flip_accuracy}

    def in_words(self, split: str) -> str:
        return f"{split} loss {self.loss:.4f}, accuracy {self.accuracy:.2f} %"


def evaluate(
    model: nn.Module,
    batches: Iterable,
    precision: Precision,
    interrupted: Callable[[], bool] = lambda: False,
    classes: int | None = None,
    exchange: Exchange | None = None,
    flip: bool = False,
) -> Evaluation | None:
    """Mean loss and accuracy of `model` over `batches`, each sample counted once.

    The host reads the sums once, at the end. Returns None if `interrupted()` has become true. With
    the number of `classes` the confusion matrix is counted too. With an `exchange` each rank passes
    its own batches, as many as the others, and the counts are of all ranks. With `flip` the inputs
    are pictures, and a second forward pass of each batch takes their mirror images.
    """
    exchange = exchange or Exchange()
    training = model.training
    model.eval()
    search_plans(False)  # the trainer decides again for each of its micro-batches
    # Of the samples as they are, and with their mirror images.
    sums = torch.zeros(2, len(SUMS), dtype=torch.float64, device=precision.device)
    counts = torch.zeros((classes or 0) ** 2, dtype=torch.int64, device=precision.device)
    try:
        # Not inference_mode: weights that FSDP gathers in the forward pass, or what a model of the
        # user's keeps of it, are needed in training.
        with torch.no_grad():
            for batch in batches:
                if interrupted():
                    return None
                with precision.autocast():
                    logits = model(batch.inputs)
                    mirrored = model(batch.inputs.flip(-1)) if flip else None
                if exchange.size > 1 and batch.filler:
                    continue
                loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
                sums[0] += stacked(classification_sums(loss, logits, batch.targets), SUMS)
                if flip:
                    log_p = mean_log_probabilities(logits, mirrored)
                    loss = F.nll_loss(log_p, batch.targets, reduction="sum")
                    sums[1] += stacked(classification_sums(loss, log_p, batch.targets), SUMS)
                if classes:
                    cell = batch.targets * classes + logits.argmax(1)
                    counts.scatter_add_(0, cell, torch.ones_like(cell))
    finally:
        model.train(training)
    values = exchange.sum(sums).tolist()
    plain, flipped = (dict(zip(SUMS, row, strict=True)) for row in values)
    counts = exchange.sum(counts) if classes else counts
    matrix = counts.reshape(classes, classes).cpu().numpy() if classes else None
    result = Evaluation(**figures(plain), samples=int(plain["samples"]), confusion=matrix)
    if not flip:
        return result
    mean = figures(flipped)
    return replace(result, flip_loss=mean["loss"], flip_accuracy=mean["accuracy"])


def mean_log_probabilities(logits: Tensor, others: Tensor) -> Tensor:
    """log((softmax(logits) + softmax(others)) / 2) in float32, (n, classes)."""
    log_p, log_q = logits.float().log_softmax(1), others.float().log_softmax(1)
    return torch.logaddexp(log_p, log_q) - math.log(2)
