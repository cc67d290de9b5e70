"""The batches of several workers, which one process trains in turn (`--strategy local`)."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

from utils.data.batch import Batch
from utils.data.loader import Loader


def in_turn(
    loader: Loader, numbers: Sequence[int], epoch: int, start_step: int = 0
) -> Generator[Batch]:
    """Those of an epoch, from optimizer step `start_step` on: in each step all micro-batches of the
    first worker, then all of the next one, and so on. The last of a step is that of the last
    worker.

    Args:
        loader: cuts steps into as many parts as there are workers, of all processes.
        numbers: of this process's workers.
    """
    with ExitStack() as stack:
        streams = []
        for number in numbers:
            own = loader.of_rank(number)
            own.turns = len(numbers)
            streams.append(stack.enter_context(closing(own.epoch(epoch, start_step))))
        for _ in range(start_step, loader.steps_per_epoch):
            for worker, stream in enumerate(streams):
                is_last = worker == len(streams) - 1
                for batch in stream:
                    ends = batch.ends_step
                    yield batch._replace(worker=worker, ends_step=ends and is_last)
                    if ends:
                        break
