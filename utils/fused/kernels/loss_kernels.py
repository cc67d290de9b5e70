"""The Triton kernel of the cross-entropy of two mixed targets: one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.fused.kernels import power_of_2


def mixed_cross_entropy(
    logits: Tensor, targets: Tensor, partners: Tensor, lam: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Losses (n,), float32, and their gradients with respect to the logits, in the logits' dtype.

    Args:
        logits: (n, classes).
        targets, partners: (n,) int64; one outside 0 to classes - 1 makes the loss NaN.
        lam: (n,).
        smoothing: 0 to 1.
    """
    if not logits.is_contiguous():
        raise ValueError("the kernel takes contiguous logits")
    n, classes = logits.shape
    losses, gradient = logits.new_empty(n, dtype=torch.float32), torch.empty_like(logits)
    block = power_of_2(classes)
    _mixed_cross_entropy[(n,)](
        losses, gradient, logits, targets.contiguous(), partners.contiguous(), lam.contiguous(),
        smoothing, classes, block,
        num_warps=min(16, max(1, block // 256)), enable_fp_fusion=True,
    )  # fmt: skip
    return losses, gradient


@triton.jit
def _mixed_cross_entropy(
    losses, gradient, logits, targets, partners, lam, smoothing, classes, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < classes
    target, partner = tl.load(targets + row), tl.load(partners + row)
    own = tl.load(lam + row).to(tl.float32)
    x = tl.load(logits + row * classes + column, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.max(x)
    exponential = tl.exp(x - largest)
    total = tl.sum(exponential)
    log_p = x - largest - tl.log(total)
    q = tl.where(column == target, own, 0.0) + tl.where(column == partner, 1 - own, 0.0)
    q = q * (1 - smoothing) + smoothing / classes
    # A class with p = 0 (its logit is minus infinity) and q = 0 adds 0, not NaN.
    loss = -tl.sum(q * tl.where(inside & (q != 0), log_p, 0.0))
    valid = (target >= 0) & (target < classes) & (partner >= 0) & (partner < classes)
    tl.store(losses + row, tl.where(valid, loss, float("nan")))
    tl.store(gradient + row * classes + column, exponential / total - q, mask=inside)
