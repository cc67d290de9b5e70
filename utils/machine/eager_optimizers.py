"""PyTorch's optimizers without the import of torch._dynamo, the first half of its compiler."""

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


@contextlib.contextmanager
def eager_optimizers() -> Iterator[None]:
    """A context that spares a process that compiles nothing two seconds of CPU time, a third of a
    short run.

    Some methods of `torch.optim` import torch._dynamo at their first call, only to keep it out of
    them. They become the functions without this wrapper.
    """
    of_all = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    places: list = [*((Optimizer, n) for n in of_all), *((k, "step") for k in (Adam, AdamW, SGD))]
    before = [getattr(kind, name) for kind, name in places]
    for (kind, name), method in zip(places, before, strict=True):
        plain = inspect.unwrap(method)
        setattr(kind, name, torch.no_grad()(plain) if name == "step" else plain)
    try:
        yield
    finally:
        for (kind, name), method in zip(places, before, strict=True):
            setattr(kind, name, method)
