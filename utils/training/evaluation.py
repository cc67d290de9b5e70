"""Evaluation: every sample once, in evaluation mode, by counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from utils.training.objective import Precision, classification_sums


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean cross-entropy, without label smoothing
    accuracy: float  # per cent
    samples: int


def evaluate(
    model: nn.Module,
    batches: Iterable,
    precision: Precision,
    interrupted: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Mean loss and accuracy of `model` over `batches`, each sample counted once.

    The host reads the sums once, at the end. Returns None when `interrupted()` turned true.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=precision.device)
    try:
        with torch.inference_mode():
            for batch in batches:
                if interrupted():
                    return None
                with precision.autocast():
                    logits = model(batch.inputs)
                loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
                sums += classification_sums(loss, logits, batch.targets)
    finally:
        model.train(training)
    loss, correct, samples = sums.tolist()
    return Evaluation(loss / samples, 100 * correct / samples, int(samples))
