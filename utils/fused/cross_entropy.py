"""Cross-entropy of two mixed targets from logits, forward and backward in one pass.

The gradient of -sum_c q_c log p_c with respect to the logits is p - q, since sum_c q_c = 1. The
forward pass computes it and saves nothing else, in the dtype of the logits: the modes "memory" and
"speed" do the same here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels, refuse_second_derivative


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, partners: Tensor, lam: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """-sum_c q_c log p_c, q = (1 - s) (lam [c = target] + (1 - lam) [c = partner]) + s / classes.

    Args:
        logits: (n, classes); in half precision they are converted to float32.
        targets, partners: (n,) int64.
        lam: (n,) or (), 0 to 1; gets no gradient.
        label_smoothing: s, 0 to 1.
    Returns:
        (n,), in float32 or float64.
    """
    return _MixedCrossEntropy.apply(logits, targets, partners, lam, label_smoothing)


class _MixedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, partners, lam, smoothing: float):
        kernel = kernels.layers(logits)
        if kernel is not None:
            lam = lam.expand_as(targets)
            losses, gradient = kernel.mixed_cross_entropy(
                logits, targets, partners, lam, float(smoothing)
            )
            ctx.save_for_backward(gradient)
            return losses
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_p = F.log_softmax(logits, 1, dtype=dtype)
        lam = lam.to(dtype).expand_as(targets)
        classes = torch.stack([targets, partners], 1)  # (n, 2)
        weights = torch.stack([lam, 1 - lam], 1)
        losses = -(weights * log_p.gather(1, classes)).sum(1)
        smoothed = smoothing / logits.shape[1]
        if smoothing:
            weights = weights * (1 - smoothing)
            losses = losses * (1 - smoothing) - log_p.sum(1) * smoothed
        if ctx.needs_input_grad[0]:
            gradient = log_p.exp_()
            if smoothing:
                gradient.sub_(smoothed)
            gradient.scatter_add_(1, classes, weights.neg_())
            ctx.save_for_backward(gradient.to(logits.dtype))
        return losses

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        (gradient,) = ctx.saved_tensors
        return (gradient * grad[:, None]).to(gradient.dtype), None, None, None, None
