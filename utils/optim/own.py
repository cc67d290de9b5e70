"""An optimizer of the user's own, `--optimizer FILE.py:NAME`."""

import functools
from typing import TYPE_CHECKING

from .. import user_files
from ..errors import UserError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make(place: str, groups: list[dict], *, lr: float) -> "Optimizer":
    """`NAME(groups, lr=..., weight_decay=...)`; the groups have their own weight decay, too. Raises
    UserError if it cannot be found, or fails to make an optimizer that steps a trial parameter."""
    import torch

    from .found_inf import honouring

    call = f"--optimizer {place}(params, lr=..., weight_decay=...)"
    found = user_files.find("--optimizer", place, "class or function", "MyOptimizer", callable)
    made = functools.partial(found, lr=lr, weight_decay=groups[0]["weight_decay"])
    trial = torch.nn.Parameter(torch.zeros(2, 2))
    trial.grad = torch.ones(2, 2)
    hint = "it takes groups of parameters, a learning rate and a weight decay"
    tried = user_files.attempt(lambda: made([groups[0] | {"params": [trial]}]), call, place, hint)
    if not isinstance(tried, torch.optim.Optimizer):
        raise UserError(f"{call} returns a {type(tried).__name__}, not a torch.optim.Optimizer")
    user_files.attempt(tried.step, f"a step of {call}", place, "it takes no closure")
    return honouring(made(groups))
