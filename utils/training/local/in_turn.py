"""The batches of several workers, which one process trains in turn (`--strategy local`)."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

from ...data.batch import Batch
from ...data.loader import Loader


def loaders_of(loader: Loader, numbers: Sequence[int]) -> list[Loader]:
    """The loaders of these workers; `loader` cuts steps into as many parts as there are workers, of
    all processes."""
    loaders = [loader.of_rank(number) for number in numbers]
    for each in loaders:
        each.turns = len(loaders)
    return loaders


def in_turn(loaders: Sequence[Loader], epoch: int, start_step: int = 0) -> Generator[Batch]:
    """Yields the micro-batches of an epoch, from optimizer step `start_step` on, of several workers
    that one process trains in turn: in each step all of the first worker, then all of the next one,
    and so on. Only the last one of the last worker ends the step.

    Args:
        loaders: of the workers, from `loaders_of`.
    """
    with ExitStack() as stack:
        streams = [
            stack.enter_context(closing(loader.epoch(epoch, start_step))) for loader in loaders
        ]
        for _ in range(start_step, loaders[0].steps_per_epoch):
            for worker, stream in enumerate(streams):
                is_last = worker == len(streams) - 1
                for batch in stream:
                    ends = batch.ends_step
                    yield batch._replace(worker=worker, ends_step=ends and is_last)
                    if ends:
                        break
