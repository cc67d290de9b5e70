"""A training loss of the user's own, `--loss FILE.py:NAME`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import user_files
from ..errors import UserError
from .class_balance import ClassBalance


@dataclass(frozen=True, eq=False)
class OwnLoss(ClassBalance):
    """function(logits (n, classes) float32, classes (n,) int64) -> losses (n,). The loss of a mixed
    sample is lam times that for its own class and 1 - lam times that for its partner's."""

    function: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def losses(self, logits: Tensor, targets: Tensor, *mixed: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = self.function(logits, targets)
        if not mixed:
            return own
        partners, lam = mixed
        return lam * own + (1 - lam) * self.function(logits, partners)


def own_loss(place: str, classes: int, device: torch.device) -> OwnLoss:
    """That of the function that "path/to/file.py:name" names. Raises UserError if it cannot be
    found, or fails with two samples."""
    function = user_files.find("--loss", place, "function", "my_loss", callable)
    logits = torch.zeros(2, classes, device=device, requires_grad=True)
    try:
        found = function(logits, torch.tensor([0, classes - 1], device=device))
    except Exception as error:
        raise UserError(
            f"--loss {place} fails{user_files.where(error, place)}; it takes logits (samples, "
            "classes) and classes (samples,)"
        ) from None
    if not isinstance(found, Tensor) or found.shape != (2,) or not found.requires_grad:
        answer = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"--loss {place} answers two samples with {answer}; it returns the loss of each, "
            "(samples,), computed from the logits: with PyTorch's losses, reduction='none'"
        )
    return OwnLoss(function=function)
