"""How a lower loss on clean samples depends on lambda, through one virtual step of the weights.

MetaMixUp: Mai, Hu, Chen, Shen and Shen, "MetaMixUp: learning adaptive interpolation policy of MixUp
with meta-learning" (2019), arXiv:1908.10059. A step of plain gradient descent on the mixed batch,

    w'(lambda) = w - lr grad_w L_mixed(w, lambda),

and its effect on the clean batch, differentiated by the chain rule:

    d L_clean(w') / d lambda = -lr v . d grad_w L_mixed(w, lambda) / d lambda,  v = grad L_clean(w')

Exactly that takes the gradient of a gradient. The product with v is a directional derivative
along v, though, and so is the limit of a difference of two ordinary gradients, as in DARTS (Liu,
Simonyan and Yang, 2019, arXiv:1806.09055, equation 8):

    -lr (d L_mixed(w + e v, lambda) - d L_mixed(w, lambda)) / d lambda / e

A gradient jumps where a ReLU opens or closes between the two ends, which the derivative knows
nothing of and a difference would divide by e. So the second end keeps the ReLUs open that are open
at w (`Gates`).

Rounding is divided by e, too. By default convolutions on a GPU since Ampere round float32 to the 10
bits of TF32 (of matrix products the user may ask the same), which is more than e v: the difference
would be noise. A second backward pass through a deep network suffers as well. So everything here is
computed in full float32, whatever the process has set, at the speed that products have without
TF32. Only `gradient_at` is not: v may be as rough as any gradient.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from utils.machine.float32 import float32_products

Weights = list[Tensor]

# How far the weights are moved, by their precision: so far in multiples of |w| (of 1 where that is
# smaller) in the tensor that is moved the most. The gradient of a deep network lies in its first
# layers, which a measure of all weights together would move too far. The square root of the
# rounding error would balance rounding and truncation where the loss bends as much as it rises;
# along the weights of a normalised network it bends more, hence the eighth.
NUDGE = {dtype: torch.finfo(dtype).eps ** 0.5 / 8 for dtype in (torch.float32, torch.float64)}

RELUS = {torch.relu, Tensor.relu, F.relu, torch.relu_, Tensor.relu_, F.relu_}


@float32_products("float32")
def exact_hypergradient(
    mixed: Callable[[Weights, Tensor], Tensor],
    clean: Callable[[Weights], Tensor],
    weights: Weights,
    lam: Tensor,
    lr: float,
) -> Tensor:
    """d clean(w') / d lambda by a second backward pass through the first one.

    Args:
        mixed: weights, lambda -> () loss; twice differentiable.
        clean: weights -> () loss.
        weights: where the virtual step begins; not changed.
        lam: (n,).
        lr: of the virtual step.
    Returns:
        of the shape of `lam`.
    """
    weights = [weight.detach().requires_grad_() for weight in weights]
    lam = lam.detach().requires_grad_()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second one
        gradient = torch.autograd.grad(
            mixed(weights, lam), weights, create_graph=True, materialize_grads=True
        )
        ahead = [w - lr * g for w, g in zip(weights, gradient, strict=True)]
        return torch.autograd.grad(clean(ahead), lam, materialize_grads=True)[0]


@float32_products("float32")
def exact_product(
    mixed: Callable[[Weights, Tensor], Tensor], weights: Weights, v: Weights, lam: Tensor
) -> Tensor:
    """v . d grad_w mixed(w, lambda) / d lambda, of the shape of `lam`, by a second backward pass.
    Of several mixed batches whose losses are added up each has a product of its own."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    lam = lam.detach().requires_grad_()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(
            mixed(weights, lam), weights, create_graph=True, materialize_grads=True
        )
        along = sum((g * part).sum() for g, part in zip(gradient, v, strict=True))
        return torch.autograd.grad(along, lam, materialize_grads=True)[0]


@float32_products("float32")
def fast_hypergradient(
    mixed: Callable[[Weights, Tensor], Tensor],
    clean: Callable[[Weights], Tensor],
    weights: Weights,
    lam: Tensor,
    lr: float,
) -> Tensor:
    """The same as `exact_hypergradient` by a difference: no graph of a gradient is kept, and the
    second backward pass of the mixed batch goes to lambda alone.

    Args:
        mixed: computes in the weights' precision (a lower one would round the difference away),
            and calls its ReLUs in the same order every time.
    """
    at = [weight.detach().requires_grad_() for weight in weights]
    gates, lam = Gates(), lam.detach().requires_grad_()
    with torch.enable_grad(), gates:
        loss = mixed(at, lam)
    here, *gradient = torch.autograd.grad(loss, [lam, *at], materialize_grads=True)
    weights = [weight.detach() for weight in weights]
    v = gradient_at(clean, torch._foreach_sub(weights, gradient, alpha=lr))
    return -lr * _difference(mixed, weights, v, lam, here, gates)


@float32_products("float32")
def fast_product(
    mixed: Callable[[Weights, Tensor], Tensor], weights: Weights, v: Weights, lam: Tensor
) -> Tensor:
    """The same as `exact_product` by a difference, with `mixed` as in `fast_hypergradient`."""
    weights = [weight.detach() for weight in weights]
    gates, lam = Gates(), lam.detach().requires_grad_()
    with torch.enable_grad(), gates:
        loss = mixed(weights, lam)
    (here,) = torch.autograd.grad(loss, lam)
    return _difference(mixed, weights, v, lam, here, gates)


def gradient_at(loss: Callable[[Weights], Tensor], weights: Weights) -> Weights:
    """grad loss(w)."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    with torch.enable_grad():
        return list(torch.autograd.grad(loss(weights), weights, materialize_grads=True))


def _difference(mixed, weights: Weights, v: Weights, lam: Tensor, here: Tensor, gates) -> Tensor:
    """(d mixed(w + e v) - d mixed(w)) / d lambda / e, with `here` for the second."""
    e = _nudge(weights, v)
    nudged = torch._foreach_add(weights, torch._foreach_mul(v, e))
    with torch.enable_grad(), gates:
        loss = mixed(nudged, lam)
    (there,) = torch.autograd.grad(loss, lam)
    return (there - here) / e


def _nudge(weights: Weights, v: Weights) -> Tensor:
    """(): e, such that no tensor of e v is longer than NUDGE times that of the weights."""
    length, of_v = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, v))
    most = (of_v / length.clamp_min(1.0)).max()
    return NUDGE[most.dtype] / most.clamp_min(torch.finfo(most.dtype).tiny)


class Gates(TorchFunctionMode):
    """Within it the first time every ReLU of a forward pass is remembered, open or closed; within
    it from then on the same forward pass finds them so."""

    def __init__(self):
        super().__init__()
        self.results: list[Tensor] = []  # of the first pass, above 0 where a ReLU is open
        self.next: Iterator[Tensor] | None = None  # of the later passes

    def __enter__(self):
        self.next = iter(self.results) if self.results else None
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in RELUS:
            return func(*args, **kwargs)
        if self.next is None:
            result = func(*args, **kwargs)
            self.results.append(result.detach())  # kept by autograd anyway
            return result
        # ReLU's own backward: the first argument where the second is above 0, else 0.
        return torch.ops.aten.threshold_backward(args[0], next(self.next), 0)
