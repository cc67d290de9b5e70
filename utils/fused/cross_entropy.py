"""Cross-entropy of two mixed targets from logits, forward and backward in one pass.

The gradient of -sum_c q_c log p_c by the logits is p - q where sum_c q_c = 1. It is at hand in the
forward pass, and all that is kept, in the precision of the logits: the modes "memory" and "speed"
are one here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.fused import kernels


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, partners: Tensor, lam: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """-sum_c q_c log p_c, q = (1 - s) (lam [c = target] + (1 - lam) [c = partner]) + s / classes.

    Args:
        logits: (n, classes); those in half precision are computed with in float32.
        targets, partners: (n,) int64.
        lam: (n,) or (), 0 to 1; no gradient goes to it.
        label_smoothing: s, 0 to 1.
    Returns:
        (n,), in float32 or float64.
    """
    return _MixedCrossEntropy.apply(logits, targets, partners, lam, label_smoothing)


class _MixedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, partners, lam, smoothing: float):
        kernel = kernels.loss(logits)
        if kernel is not None:
            lam = lam.expand_as(targets)
            losses, gradient = kernel.mixed_cross_entropy(
                logits, targets, partners, lam, float(smoothing)
            )
            ctx.save_for_backward(gradient)
            return losses
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_p = F.log_softmax(logits, 1, dtype=exact)
        lam = lam.to(exact).expand_as(targets)
        both = torch.stack([targets, partners], 1)  # (n, 2)
        weights = torch.stack([lam, 1 - lam], 1)
        losses = -(weights * log_p.gather(1, both)).sum(1)
        even = smoothing / logits.shape[1]
        if smoothing:
            weights = weights * (1 - smoothing)
            losses = losses * (1 - smoothing) - log_p.sum(1) * even
        if ctx.needs_input_grad[0]:
            gradient = log_p.exp_()
            if smoothing:
                gradient.sub_(even)
            gradient.scatter_add_(1, both, weights.neg_())
            ctx.save_for_backward(gradient.to(logits.dtype))
        return losses

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # `once_differentiable` would leave parts out unsaid
            raise RuntimeError("fused cross-entropy has no second derivative")
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[:, None]).to(gradient.dtype), None, None, None, None
