"""PyTorch's optimizers without the import of torch._dynamo, the first half of its compiler."""

import functools
import inspect

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


@functools.cache  # a second time would take away the hooks that optimizers have got meanwhile
def keep_optimizers_eager() -> None:
    """Spares a process that compiles nothing two seconds of CPU time, a third of a short run.

    Some methods of `torch.optim` import torch._dynamo at their first call, only to keep it out of
    them. They become the functions without this wrapper.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(Optimizer, name, inspect.unwrap(getattr(Optimizer, name)))
    for kind in (Adam, AdamW, SGD):
        kind.step = torch.no_grad()(inspect.unwrap(kind.step))  # type: ignore[method-assign]
