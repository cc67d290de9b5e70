"""The training loss for classes that are not equal, and that of the user's own.

Class weights as in torch.nn.CrossEntropyLoss(weight=...); the focal loss: Lin et al., "Focal loss
for dense object detection" (2017), arXiv:1708.02002, equation 4, for several classes; logit
adjustment: Menon et al., "Long-tail learning via logit adjustment" (2021), arXiv:2007.07314,
equation 10.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import user_files
from ..errors import UserError


@dataclass(frozen=True, eq=False)
class ClassBalance:
    """Cross-entropy CE that may weigh classes, fade out easy samples, and shift logits.

    With a sample's logits z, its class y, and log p = log_softmax(z + logit_shift), its loss is

        (1 - p_y)^gamma ((1 - s) w_y (-log p_y) + s / classes sum_c w_c (-log p_c))

    which without gamma is that of CrossEntropyLoss(weight=w, label_smoothing=s). Of a sample that
    is mixed it is lam times the loss for its own class and 1 - lam times that for its partner's.
    The loss of a step is the sum over its samples divided by the sum of `sample_weights`.
    """

    label_smoothing: float = 0.0  # s, 0 to 1
    weights: Tensor | None = None  # w, (classes,), 0 or more; None: all are 1
    focal_gamma: float = 0.0  # gamma, 0 or more
    logit_shift: Tensor | None = None  # tau log(prior), (classes,); None: 0

    def losses(self, logits: Tensor, targets: Tensor, *mixed: Tensor) -> Tensor:
        """The loss of each sample, weighted, (n,).

        Args:
            logits: (n, classes).
            targets: (n,) int64.
            mixed: of mixed samples the classes of their partners, (n,) int64, and lambda, (n,), 0
                to 1; differentiable.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.logit_shift is not None:
            logits = logits + self.logit_shift.to(logits.dtype)
        log_p = F.log_softmax(logits, 1)
        own = self._losses(log_p, targets)
        if not mixed:
            return own
        partners, lam = mixed[0], mixed[1].to(log_p.dtype)
        return lam * own + (1 - lam) * self._losses(log_p, partners)

    def _losses(self, log_p: Tensor, targets: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights.to(log_p.dtype)
        losses = F.nll_loss(log_p, targets, weights, reduction="none")
        if self.label_smoothing:
            even = self.label_smoothing / log_p.shape[1]
            spread = log_p if weights is None else log_p * weights
            losses = (1 - self.label_smoothing) * losses - spread.sum(1) * even
        if self.focal_gamma:
            log_p_of_class = -F.nll_loss(log_p, targets, reduction="none")
            # At p = 1 the derivative of a power below 1 would be infinite.
            rest = (-torch.expm1(log_p_of_class)).clamp_min(torch.finfo(log_p.dtype).eps)
            losses = losses * rest**self.focal_gamma
        return losses

    @property
    def run_info(self) -> dict:
        """For checkpoints, since a resumed run must have the same weights."""
        return {} if self.weights is None else {"class_weights": self.weights.tolist()}

    def sample_weights(self, targets: Tensor, *mixed: Tensor) -> Tensor:
        """The weight of each sample, (n,); arguments as of `losses`."""
        assert self.weights is not None
        own = self.weights[targets]
        if not mixed:
            return own
        partners, lam = mixed
        return lam * own + (1 - lam) * self.weights[partners]


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
    targets = torch.tensor([0, classes - 1], device=device)
    takes = "it takes logits (samples, classes) and classes (samples,)"
    found = user_files.attempt(lambda: function(logits, targets), f"--loss {place}", place, takes)
    if not isinstance(found, Tensor) or found.shape != (2,) or not found.requires_grad:
        answer = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"--loss {place} answers two samples with {answer}; it returns the loss of each, "
            "(samples,), computed from the logits: with PyTorch's losses, reduction='none'"
        )
    return OwnLoss(function=function)
