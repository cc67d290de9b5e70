"""An optimizer of the user's own, `--optimizer FILE.py:NAME`."""

import functools
from typing import TYPE_CHECKING

from .. import user_files
from ..errors import UserError
from .entry import MATRICES, OptimizerEntry

if TYPE_CHECKING:
    from torch.optim import Optimizer


def own_optimizer(place: str) -> OptimizerEntry:
    """Of the class or function that `place`, "path/to/file.py:Name", names; see `make`."""
    return OptimizerEntry(
        summary="an optimizer of the user's own",
        make=functools.partial(make, place),
        lr=None,
        weight_decay=0.0,
        needs=MATRICES,  # nobody knows
    )


def make(place: str, groups: list[dict], *, lr: float) -> "Optimizer":
    """`NAME(groups, lr=..., weight_decay=...)`; the groups have their own weight decay, too. Tries
    a step of it before.

    Raises:
        UserError: it cannot be found, fails, or makes no optimizer.
    """
    import torch

    from .found_inf import honouring

    call = f"--optimizer {place}(params, lr=..., weight_decay=...)"
    found = user_files.find("--optimizer", place, "class or function", "MyOptimizer", callable)
    trial = torch.nn.Parameter(torch.zeros(2, 2))
    trial.grad, decay = torch.ones(2, 2), groups[0]["weight_decay"]
    try:
        tried, optimizer = (
            found(params, lr=lr, weight_decay=decay)
            for params in ([{"params": [trial], "weight_decay": decay}], groups)
        )
        if isinstance(tried, torch.optim.Optimizer):
            tried.step()
            return honouring(optimizer)
    except Exception as error:
        raise UserError(f"{call} fails{user_files.where(error, place)}") from None
    raise UserError(f"{call} returns a {type(tried).__name__}, not a torch.optim.Optimizer")
