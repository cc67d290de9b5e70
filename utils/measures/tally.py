"""Counts what measures are made of, over batches and ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..exchange import Exchange

BINS = 15  # of confidence, as torchmetrics has by default


@dataclass(frozen=True)
class Counts:
    """Of all samples of a split.

    Attributes:
        samples: how many there are.
        hits: {k: samples whose class is among the k likeliest}.
        confusions: (classes, classes) int64, a row for each true class and a column for each
            predicted one; None: not counted.
        bins: (3, BINS), by the probability of the likeliest class: samples, correct ones and the
            sum of these probabilities; None: not counted.
        scores: (targets (samples,) int64, probabilities (samples, classes) float32), in the order
            of ranks; None: not kept.
    """

    samples: int
    hits: dict[int, int] = field(default_factory=dict)
    confusions: np.ndarray | None = None
    bins: np.ndarray | None = None
    scores: tuple[np.ndarray, np.ndarray] | None = None


class Tally:
    """Args:
    classes: their number.
    device: of the logits.
    sources: what is counted: "confusions", "calibration", "scores" (see `Measure.of`).
    top: the k whose hits are counted.
    """

    def __init__(
        self,
        classes: int,
        device: torch.device,
        sources: Collection[str] = (),
        top: Collection[int] = (),
    ):
        self.classes, self.top = classes, sorted(top)
        counts = {"dtype": torch.int64, "device": device}
        self._samples = torch.zeros(1 + len(self.top), **counts)  # and those that are hits
        self._confusions = torch.zeros(classes**2, **counts) if "confusions" in sources else None
        bins = torch.zeros(3, BINS, dtype=torch.float64, device=device)
        self._bins = bins if "calibration" in sources else None
        self._scores: list[tuple[Tensor, Tensor]] | None = [] if "scores" in sources else None

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Counts a batch: (n, classes), (n,) int64. The host does not wait."""
        logits = logits.detach().float()
        guess = logits.argmax(1)
        hits = [
            (logits.topk(min(k, self.classes), 1).indices == targets[:, None]).sum()
            for k in self.top
        ]
        self._samples += torch.stack([torch.full_like(targets.sum(), len(targets)), *hits])
        if self._confusions is not None:
            cells = targets * self.classes + guess
            self._confusions.scatter_add_(0, cells, torch.ones_like(cells))
        if self._bins is None and self._scores is None:
            return
        probabilities = logits.softmax(1)
        if self._bins is not None:
            confidence = probabilities.amax(1).double()
            place = (confidence * BINS).long().clamp(0, BINS - 1)
            rows = torch.ones_like(confidence), (guess == targets).double(), confidence
            self._bins.scatter_add_(1, place.expand(3, -1), torch.stack(rows))
        if self._scores is not None:
            self._scores.append((targets, probabilities))

    def counts(self, exchange: Exchange) -> Counts:
        """Of all ranks; collective."""
        samples, *hits = exchange.sum(self._samples).tolist()
        confusions = bins = None
        if self._confusions is not None:
            square = exchange.sum(self._confusions).reshape(self.classes, self.classes)
            confusions = square.cpu().numpy()
        if self._bins is not None:
            bins = exchange.sum(self._bins).cpu().numpy()
        return Counts(
            samples,
            dict(zip(self.top, hits, strict=True)),
            confusions,
            bins,
            self._gather(exchange),
        )

    def _gather(self, exchange: Exchange) -> tuple[np.ndarray, np.ndarray] | None:
        if self._scores is None:
            return None
        device = self._samples.device
        none = (
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, self.classes, device=device),
        )
        targets, scores = (torch.cat(parts) for parts in zip(none, *self._scores, strict=True))
        counts = [int(n) for n in exchange.gather(torch.tensor(len(targets)))]
        gathered = []
        for own in (targets, scores):
            # `gather` takes tensors of one shape.
            padded = own.new_zeros(max(counts), *own.shape[1:])
            padded[: len(own)] = own
            parts = exchange.gather(padded)
            whole = [part[:n].cpu() for part, n in zip(parts, counts, strict=True)]
            gathered.append(torch.cat(whole).numpy())
        return gathered[0], gathered[1]
