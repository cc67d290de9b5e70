"""Evaluation: every sample once, in evaluation mode, by counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from utils.exchange import Exchange
from utils.machine.cudnn import search_plans
from utils.training.objective import Precision, classification_sums


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean cross-entropy, without label smoothing
    accuracy: float  # per cent
    samples: int
    # (classes, classes) int64 where it was asked for: rows are the classes, columns what the
    # model took them for
    confusion: np.ndarray | None = None

    @property
    def figures(self) -> dict:
        """For the metrics and the summary."""
        return {"loss": self.loss, "accuracy": self.accuracy, "samples": self.samples}


def evaluate(
    model: nn.Module,
    batches: Iterable,
    precision: Precision,
    interrupted: Callable[[], bool] = lambda: False,
    classes: int | None = None,
    exchange: Exchange | None = None,
) -> Evaluation | None:
    """Mean loss and accuracy of `model` over `batches`, each sample counted once.

    The host reads the sums once, at the end. Returns None when `interrupted()` turned true. With
    the number of `classes` the confusion matrix is counted too. With an `exchange` every rank has
    its own part of the batches, as many as the others, and the counts are of all.
    """
    exchange = exchange or Exchange()
    training = model.training
    model.eval()
    search_plans(False)  # the trainer decides again for each of its micro-batches
    sums = torch.zeros(3, dtype=torch.float64, device=precision.device)
    counts = torch.zeros((classes or 0) ** 2, dtype=torch.int64, device=precision.device)
    try:
        # A model that is divided is put together from tensors that must not know of inference.
        with torch.inference_mode() if exchange.size == 1 else torch.no_grad():
            for batch in batches:
                if interrupted():
                    return None
                if exchange.size > 1 and batch.filler:
                    with precision.autocast():
                        model(batch.inputs)
                    continue
                with precision.autocast():
                    logits = model(batch.inputs)
                loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
                sums += classification_sums(loss, logits, batch.targets)
                if classes:
                    cell = batch.targets * classes + logits.argmax(1)
                    counts.scatter_add_(0, cell, torch.ones_like(cell))
    finally:
        model.train(training)
    loss, correct, samples = exchange.sum(sums).tolist()
    counts = exchange.sum(counts) if classes else counts
    matrix = counts.reshape(classes, classes).cpu().numpy() if classes else None
    return Evaluation(loss / samples, 100 * correct / samples, int(samples), matrix)
