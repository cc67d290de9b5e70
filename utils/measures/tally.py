"""Counts what measures are made of, over batches and ranks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..exchange import Exchange
from .table import Measure

BINS = 15  # of confidence, as torchmetrics has by default

# What `Tally.counts` returns: by `Measure.of`, over all samples,
#     "hits": (k + 1,) int64, samples whose class is the likeliest, the second ... k-th; the others
#     "confusions": (classes, classes) int64, by true class (row) and predicted class (column)
#     "calibration": (3, BINS) float64, by the probability of the likeliest class: samples, correct
#         ones, and the sum of these probabilities
#     "scores": (samples, 1 + classes) float32, the class, and the probabilities of all classes
Counts = dict[str, np.ndarray]


class Tally:
    """Args:
    classes: their number.
    device: of the logits.
    measures: those that the counts are for.
    """

    def __init__(self, classes: int, device: torch.device, measures: Collection[Measure] = ()):
        needed = {measure.of for measure in measures}
        self.classes, self.most = classes, max((measure.k for measure in measures), default=1)
        shapes = {"hits": (self.most + 1,), "confusions": (classes, classes)}
        self._sums = {
            name: torch.zeros(shape, dtype=torch.int64, device=device)
            for name, shape in shapes.items()
            if name in needed
        }
        if "calibration" in needed:
            self._sums["calibration"] = torch.zeros(3, BINS, dtype=torch.float64, device=device)
        self._scores = [torch.zeros(0, 1 + classes, device=device)] if "scores" in needed else None

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Counts a batch: (n, classes), (n,) int64. The host does not wait."""
        logits = logits.detach().float()
        guess = logits.argmax(1)
        if (hits := self._sums.get("hits")) is not None:
            found = (logits.topk(self.most, 1).indices == targets[:, None]).sum(0)  # (most,)
            hits += torch.cat([found, len(targets) - found.sum(0, keepdim=True)])
        if (confusions := self._sums.get("confusions")) is not None:
            cells = targets * self.classes + guess
            confusions.view(-1).scatter_add_(0, cells, torch.ones_like(cells))
        bins = self._sums.get("calibration")
        if bins is None and self._scores is None:
            return
        probabilities = logits.softmax(1)
        if bins is not None:
            confidence = probabilities.amax(1).double()
            place = (confidence * BINS).long().clamp(0, BINS - 1)
            rows = torch.ones_like(confidence), (guess == targets).double(), confidence
            bins.scatter_add_(1, place.expand(3, -1), torch.stack(rows))
        if self._scores is not None:
            self._scores.append(torch.cat([targets[:, None].float(), probabilities], 1))

    def counts(self, exchange: Exchange) -> Counts:
        """Of all ranks; collective."""
        counts = {name: exchange.sum(sums).cpu().numpy() for name, sums in self._sums.items()}
        if self._scores is not None:
            scores = torch.cat(self._scores)
            samples = [int(n) for n in exchange.gather(torch.tensor(len(scores)))]
            # `gather` takes tensors of one shape.
            padded = scores.new_zeros(max(samples), 1 + self.classes)
            padded[: len(scores)] = scores
            parts = zip(exchange.gather(padded), samples, strict=True)
            counts["scores"] = torch.cat([part[:n].cpu() for part, n in parts]).numpy()
        return counts
