"""The gradient of the loss on clean samples with respect to lambda, through one virtual step.

MetaMixUp: Mai, Hu, Chen, Shen and Shen, "MetaMixUp: learning adaptive interpolation policy of MixUp
with meta-learning" (2019), arXiv:1908.10059. A step of plain gradient descent on the mixed batch,

    w'(lambda) = w - lr grad_w L_mixed(w, lambda),

and its effect on the clean batch, differentiated by the chain rule:

    d L_clean(w') / d lambda = -lr v . d grad_w L_mixed(w, lambda) / d lambda,  v = grad L_clean(w')

Computing this exactly takes a second backward pass through the first. But the product with v is a
directional derivative along v, which a finite difference of two ordinary gradients approximates, as
in DARTS (Liu, Simonyan and Yang, 2019, arXiv:1806.09055, equation 8):

    -lr (d L_mixed(w + e v, lambda) - d L_mixed(w, lambda)) / d lambda / e

Where a ReLU or a max-pooling switches between w and w + e v, the gradient jumps. The exact
derivative ignores such jumps, but the difference would divide them by e. So in the second
evaluation these functions take the branches that they took in the first (`Branches`).

Rounding errors are divided by e, too. By default, convolutions on a GPU since Ampere round float32
to the 10 bits of TF32 (matrix products do so on request), which is more than e v: the difference
would be noise. A second backward pass through a deep network suffers as well. So everything here
runs in full float32, whatever the process has set, at the cost of running without TF32. The one
exception is `gradient_at`: v need not be more accurate than any other gradient.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UserError
from ..machine.backends import float32_products
from .branches import Branches

Weights = list[Tensor]

# Size of the finite difference, by dtype: max |e v| / max(|w|, 1) over the weight tensors. Taken
# per tensor because a deep network's gradient is concentrated in its first layers, which a norm
# over all weights would move too far. sqrt(eps) balances rounding and truncation errors where
# curvature and slope are of equal size; a normalised network has more curvature, hence the 1/8.
RELATIVE_STEP = {t: torch.finfo(t).eps ** 0.5 / 8 for t in (torch.float32, torch.float64)}


@float32_products("float32")
def exact_hypergradient(
    mixed: Callable[[Weights, Tensor], Tensor],
    clean: Callable[[Weights], Tensor],
    weights: Weights,
    lam: Tensor,
    lr: float,
) -> Tensor:
    """d clean(w') / d lambda by a second backward pass through the first.

    Args:
        mixed: weights, lambda -> () loss; twice differentiable.
        clean: weights -> () loss.
        weights: w, before the virtual step; not changed.
        lam: (n,).
        lr: learning rate of the virtual step.
    Returns:
        (n,).
    """
    with _second_derivatives():
        weights, lam, gradient = _leaves_and_gradient(mixed, weights, lam)
        stepped = [w - lr * g for w, g in zip(weights, gradient, strict=True)]  # w'
        return torch.autograd.grad(clean(stepped), lam, materialize_grads=True)[0]


@float32_products("float32")
def exact_product(
    mixed: Callable[[Weights, Tensor], Tensor], weights: Weights, v: Weights, lam: Tensor
) -> Tensor:
    """v . d grad_w mixed(w, lambda) / d lambda, in the shape of `lam`, by a second backward pass.

    If the loss is a sum over several mixed batches, each batch's product is computed by itself."""
    with _second_derivatives():
        _, lam, gradient = _leaves_and_gradient(mixed, weights, lam)
        product = sum((g * part).sum() for g, part in zip(gradient, v, strict=True))
        return torch.autograd.grad(product, lam, materialize_grads=True)[0]


@contextlib.contextmanager
def _second_derivatives() -> Iterator[None]:
    """A context for differentiating twice: gradients are on, and attention is plain, since fused
    attention has no second derivative. Raises UserError where a function of the model has none."""
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:
        if not str(error).startswith("derivative for "):
            raise
        raise UserError(
            f"--meta_exact: this model has no second derivative ({error}); leave the flag out"
        ) from None


def _leaves_and_gradient(mixed, weights: Weights, lam: Tensor) -> tuple[Weights, Tensor, Weights]:
    """w and lambda, and grad_w mixed(w, lambda), which can be differentiated by both."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    lam = lam.detach().requires_grad_()
    loss = mixed(weights, lam)
    gradient = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
    return weights, lam, list(gradient)


@float32_products("float32")
def fast_hypergradient(
    mixed: Callable[[Weights, Tensor], Tensor],
    clean: Callable[[Weights], Tensor],
    weights: Weights,
    lam: Tensor,
    lr: float,
) -> Tensor:
    """`exact_hypergradient`, approximated by a finite difference: no graph of a gradient is built,
    and the second backward pass of the mixed batch computes only the gradient of lambda.

    Args:
        mixed: computes in the weights' precision (a lower one would round the difference away),
            and calls its functions in the same order every time.
    """
    leaves = [weight.detach().requires_grad_() for weight in weights]
    branches, lam = Branches(), lam.detach().requires_grad_()
    with torch.enable_grad(), branches:
        loss = mixed(leaves, lam)
    lam_grad, *gradient = torch.autograd.grad(loss, [lam, *leaves], materialize_grads=True)
    weights = [weight.detach() for weight in weights]
    v = gradient_at(clean, torch._foreach_sub(weights, gradient, alpha=lr))
    return -lr * _difference(mixed, weights, v, lam, lam_grad, branches)


@float32_products("float32")
def fast_product(
    mixed: Callable[[Weights, Tensor], Tensor], weights: Weights, v: Weights, lam: Tensor
) -> Tensor:
    """`exact_product`, approximated by a finite difference; `mixed` as in `fast_hypergradient`."""
    weights = [weight.detach() for weight in weights]
    branches, lam = Branches(), lam.detach().requires_grad_()
    with torch.enable_grad(), branches:
        loss = mixed(weights, lam)
    (lam_grad,) = torch.autograd.grad(loss, lam)
    return _difference(mixed, weights, v, lam, lam_grad, branches)


def gradient_at(loss: Callable[[Weights], Tensor], weights: Weights) -> Weights:
    """grad loss(w)."""
    weights = [weight.detach().requires_grad_() for weight in weights]
    with torch.enable_grad():
        return list(torch.autograd.grad(loss(weights), weights, materialize_grads=True))


def _difference(
    mixed, weights: Weights, v: Weights, lam: Tensor, lam_grad: Tensor, branches
) -> Tensor:
    """(d mixed(w + e v) - d mixed(w)) / d lambda / e; `lam_grad` is d mixed(w) / d lambda."""
    e = _step_size(weights, v)
    moved = torch._foreach_add(weights, torch._foreach_mul(v, e))
    with torch.enable_grad(), branches:
        loss = mixed(moved, lam)
    (moved_grad,) = torch.autograd.grad(loss, lam)
    return (moved_grad - lam_grad) / e


def _step_size(weights: Weights, v: Weights) -> Tensor:
    """e, (): see RELATIVE_STEP."""
    w_norm, v_norm = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, v))
    largest = (v_norm / w_norm.clamp_min(1.0)).max()
    return RELATIVE_STEP[largest.dtype] / largest.clamp_min(torch.finfo(largest.dtype).tiny)
