"""Makes the next batch while the GPU trains on the current one."""

import functools
from collections.abc import Callable, Generator, Iterable
from itertools import chain

import torch

from utils.data.batch import Batch


def one_ahead(makers: Iterable[Callable[[], Batch]], device: torch.device) -> Generator[Batch]:
    """Makes each batch on a side stream while the previous one is in use."""
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # the resident images were copied there
    ahead = None
    for make in chain(makers, [None]):
        ready = ahead
        if make is not None:
            with torch.cuda.stream(side):
                ahead = make(), side.record_event()
        if ready is not None:
            batch, made = ready
            training = torch.cuda.current_stream(device)
            training.wait_event(made)  # the device waits, the host does not
            for tensor in batch.tensors():
                tensor.record_stream(training)
            yield batch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all epochs: the allocator reuses memory within a stream only."""
    return torch.cuda.Stream(device)
