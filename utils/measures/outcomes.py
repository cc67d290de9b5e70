"""What a model answered to each sample of a split, kept in a file so that memory stays flat."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..exchange import Exchange
from ..files import reason

# Up to so many classes the probability of each is kept, above only the largest.
MOST_CLASSES, LARGEST = 100, 5
CHUNK = 8192  # samples that are read, or gathered from a rank, at a time


def answers_of(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(classes, probabilities), (n, k) each: all classes in their order, or of more than
    MOST_CLASSES the LARGEST likeliest, the likeliest first.

    Args:
        probabilities: (n, classes).
    """
    n, classes = probabilities.shape
    if classes <= MOST_CLASSES:
        return np.broadcast_to(np.arange(classes), (n, classes)), probabilities
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :LARGEST]
    return order, np.take_along_axis(probabilities, order, 1)


class Outcomes:
    """Records the answers to a split in an evaluation, and reads them again in the order of the
    split's samples.

    A row of the file is float32: true class, loss, probabilities, and above MOST_CLASSES the
    classes that these belong to. Each rank writes its own rows; `finish` brings them to rank 0.

    Args:
        classes: their number.
        visited: of each rank the samples that it evaluates, (n,) int64, in the order of its
            batches.
        exchange: with the other ranks.

    Attributes:
        failure: why there are no answers; None: there are.
    """

    def __init__(self, classes: int, visited: Sequence[np.ndarray], exchange: Exchange):
        self.classes, self.visited, self.exchange = classes, visited, exchange
        self.samples = sum(map(len, visited))
        self.failure: str | None = None
        self.keeps_all = classes <= MOST_CLASSES
        self._width = 2 + (classes if self.keeps_all else 2 * LARGEST)
        self._written = 0
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            self.failure = reason(error)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Records a batch: (n, classes), (n,) int64. The host waits for the batch before."""
        log_p = logits.detach().float().log_softmax(1)
        losses = -log_p.gather(1, targets[:, None])
        if self.keeps_all:
            rows = torch.cat([targets[:, None].float(), losses, log_p.exp()], 1)
        else:
            largest = log_p.topk(LARGEST, 1)
            parts = targets[:, None].float(), losses, largest.values.exp(), largest.indices.float()
            rows = torch.cat(parts, 1)
        copy = rows.to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(rows.device).record_event() if rows.is_cuda else None
        self._pending.append((copy, event))
        while len(self._pending) > 1:
            self._write_first()

    def _write_first(self) -> None:
        rows, event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        end = self._written + len(rows)
        self._place(self.visited[self.exchange.rank][self._written : end], rows.numpy())
        self._written = end

    def _place(self, samples: np.ndarray, rows: np.ndarray) -> None:
        """Writes the rows, (n, width), of these samples, (n,)."""
        if self.failure is not None:
            return
        order = np.argsort(samples, kind="stable")
        samples, rows = samples[order], rows[order]
        firsts = np.flatnonzero(np.diff(samples, prepend=-2) != 1)  # of samples without gaps
        try:
            for first, part in zip(firsts, np.split(rows, firsts[1:]), strict=True):
                self._file.seek(int(samples[first]) * 4 * self._width)
                self._file.write(np.ascontiguousarray(part))
        except OSError as error:
            self.failure = reason(error)

    def finish(self) -> None:
        """Brings the rows of all ranks to rank 0. Collective, after the last batch."""
        while self._pending:
            self._write_first()
        if self.failure is None:
            try:
                self._file.flush()  # the last rows may not fit; all ranks must know of it
            except OSError as error:
                self.failure = reason(error)
        exchange, rank = self.exchange, self.exchange.rank
        failures = exchange.gather_json(self.failure)
        self.failure = next(filter(None, failures), None)
        if self.failure is not None or exchange.size == 1:
            return
        for start in range(0, max(map(len, self.visited)), CHUNK):
            parts = [samples[start : start + CHUNK] for samples in self.visited]
            # `gather` takes tensors of one shape.
            rows = torch.zeros(max(map(len, parts)), self._width)
            if rank:
                rows[: len(parts[rank])] = torch.from_numpy(self._read(parts[rank]))
            gathered = exchange.gather(rows)
            for other in range(1, exchange.size) if rank == 0 else ():
                self._place(parts[other], gathered[other][: len(parts[other])].numpy())

    def _read(self, samples: np.ndarray) -> np.ndarray:
        """(n, width) float32: the rows of these samples, (n,)."""
        rows = np.empty((len(samples), self._width), np.float32)
        for place, sample in enumerate(samples.tolist()):
            self._file.seek(sample * 4 * self._width)
            self._file.readinto(rows[place])  # type: ignore[attr-defined]
        return rows

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """On rank 0: true classes (n,) int64, losses (n,), and `answers_of` the samples, in their
        order, CHUNK at a time. Raises OSError."""
        self._file.seek(0)
        for start in range(0, self.samples, CHUNK):
            n = min(CHUNK, self.samples - start)
            rows = np.frombuffer(self._file.read(4 * n * self._width), np.float32)
            rows = rows.reshape(n, self._width)
            targets, losses = rows[:, 0].astype(np.int64), rows[:, 1]
            if self.keeps_all:
                yield targets, losses, *answers_of(rows[:, 2:])
            else:
                order = rows[:, 2 + LARGEST :].astype(np.int64)
                yield targets, losses, order, rows[:, 2 : 2 + LARGEST]
