"""The next batch is made while the GPU trains on the one before."""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch

from utils.data.batch import Batch


def one_ahead(makers: Iterable[Callable[[], Batch]], device: torch.device) -> Iterator[Batch]:
    """Makes each batch on a side stream while the one before it is being used."""
    side = _side_stream(device)
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
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: the allocator keeps the free memory of each stream for that stream."""
    return torch.cuda.Stream(device)
