"""The batches of several workers, which one process trains in turn (`--strategy local`)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from utils.data.batch import Batch
from utils.data.loader import Loader


class InTurn:
    """In each optimizer step all micro-batches of the first worker, then all of the next one, and
    so on. In all else it is the loader of the first worker.

    Args:
        loader: cuts steps into as many parts as there are workers, of all processes.
        numbers: of this process's workers.
    """

    def __init__(self, loader: Loader, numbers: Sequence[int]):
        self.loader = loader
        self.loaders = [loader.of_rank(number) for number in numbers]
        for each in self.loaders:
            each.turns = len(self.loaders)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def largest(self) -> int:
        return max(loader.largest() for loader in self.loaders)

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Generator[Batch]:
        """The last micro-batch of a step is that of the last worker."""
        with ExitStack() as stack:
            streams = [
                stack.enter_context(closing(loader.epoch(epoch, start_step)))
                for loader in self.loaders
            ]
            for _ in range(start_step, self.loader.steps_per_epoch):
                for worker, stream in enumerate(streams):
                    is_last = worker == len(streams) - 1
                    for batch in stream:
                        ends = batch.ends_step
                        yield batch._replace(worker=worker, ends_step=ends and is_last)
                        if ends:
                            break
