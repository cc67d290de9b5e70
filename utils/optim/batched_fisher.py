"""The Fisher matrices of many tensors of one shape at once, without waiting for a GPU.

The same mathematics as `fisher.py`, which explains it, in batched matrix products alone. Two
things are done in another way:

- The eigenvectors of Z = Y Y' are not needed. With the polar decomposition Y = Lambda R, Lambda =
  Z^1/2 and R = Z^-1/2 Y, the matrix F is the same as with Lambda = C^1/2 and R = C^-1/2 U'Y, in a
  basis that is rotated by U. `torch.linalg.eigh` waits on a GPU and takes one matrix after another
  on a CPU; Z^-1/2 comes from a fixed number of matrix products (`inverse_root`).
- Nothing is decided on the host: an update that would not be finite, or is told to be left out, is
  taken back by selection.

What a step costs are the products H = X R' and X - H V, where V = (I - beta (Lambda + beta0 I)^-1)
R is kept from update to update. Where 2 r >= D, as along short axes, the whole matrix I - R'V is
kept instead: one product with it costs no more, and passes over the gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.optim.fisher import DELTA, size_of, smallest

# Odd polynomials a x + b x^3 + c x^5 that drive all singular values of a matrix to 1. The first
# lifts small ones by 3.44 at a time and keeps all within 0.7 and 1.2 (Jordan et al., "Muon", 2024);
# the second is Newton-Schulz's of fifth order and converges from there (Higham, "Functions of
# matrices", 2008, ch. 8).
LIFT, CONVERGE = (3.4445, -4.7750, 2.0315), (15 / 8, -10 / 8, 3 / 8)
TO_THE_ROOT = (LIFT,) * 8 + (CONVERGE,) * 2
POLISH = (CONVERGE,) * 4
SHORT = 16  # axes in the middle, as those of kernels, up to this length: without a copy


@dataclass
class AxisBatch:
    """One axis, of length D, of B tensors.

    Attributes:
        dim: of the axis in the stacked gradients, whose dimension 0 is the tensors.
        alpha, eta: settings.
        basis: R, (B, r, D). spectrum: Lambda, (B, r, r). rest: rho, (B,).
        whole: whether `multiplier` is I - R'V (B, D, D); else it is V (B, r, D).
        scatter: of the last gradient, where it is to be taken up by `update_`.
    """

    dim: int
    alpha: float
    eta: float
    basis: Tensor
    spectrum: Tensor
    rest: Tensor
    scatter: Scatter | None = None

    def __post_init__(self):
        tensors, rank, length = self.basis.shape
        self.whole = 2 * rank >= length
        self.multiplier = self.basis.new_empty(tensors, length if self.whole else rank, length)
        refresh_multiplier(self)


@dataclass
class Scatter:
    """product: R X'X, (B, r, D). scale: (B,), by which X'X is multiplied to give S.
    trace: tr(S), (B,)."""

    product: Tensor
    scale: Tensor
    trace: Tensor


def precondition_(
    x: Tensor, axis: AxisBatch, other: Tensor | None, square: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The stacked gradients x (B, ...) times I - R'V along `axis`; they are not scaled.

    Args:
        other: memory like x, which the result takes where `axis.whole`; else it takes that of x.
        square: (B,) squared norms of the gradients as they came, where the axis is to be updated:
            what the update needs of x is noted in `axis.scatter`. F is of gradients scaled to the
            norm that they had: the axes before leave their mark on directions alone.

    Returns:
        (result, the memory that is free now)
    """
    tensors, _, length = axis.basis.shape
    before, after = x.shape[1 : axis.dim].numel(), x.shape[axis.dim + 1 :].numel()
    turned = x.movedim(axis.dim, -1)
    basis, multiplier = axis.basis, axis.multiplier
    last, copied = after == 1, before > 1 and after > 1 and length > SHORT
    if last or copied:
        last, seen = True, turned.reshape(tensors, -1, length)
    else:
        seen = x.view(tensors * before, length, after)
        if before > 1:  # an axis of a kernel
            basis, multiplier = (each.repeat_interleave(before, 0) for each in (basis, multiplier))
    small = None if axis.whole else (seen @ basis.mT if last else basis @ seen)  # H
    if square is not None:
        if axis.whole:
            product = seen.mT @ seen if last else seen @ seen.mT
        else:
            product = small.mT @ seen if last else small @ seen.mT
        if len(product) > tensors:
            product = product.view(tensors, before, *product.shape[1:]).sum(1)
        if axis.whole:
            product = axis.basis @ product
        share, now = length / x[0].numel(), square_norms(x)  # share: 1 / N
        scale = torch.where(now > 0, square / now * share, 0.0)
        axis.scatter = Scatter(product, scale, square * share)
    if axis.whole:
        factors = (seen, multiplier) if last else (multiplier.mT, seen)
        seen = torch.bmm(*factors, out=other.view(seen.shape))
        if not copied:
            return other, x
    else:
        seen.baddbmm_(*((small, multiplier) if last else (multiplier.mT, small)), alpha=-1)
    if copied:
        turned.copy_(seen.view(turned.shape))
    return x, other


def square_norms(x: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).square()


def update_(axes: list[AxisBatch], left_out: Tensor | None) -> None:
    """All axes take up the scatter that `precondition_` has noted.

    Args:
        left_out: () bool; where true, all stay as they are.
    """
    smoothed = [_smoothed_scatter(axis) for axis in axes]
    roots = _by_rank(inverse_root, [each.y @ each.y.mT for each in smoothed])
    bases = [root @ each.y for root, each in zip(roots, smoothed, strict=True)]
    roots = _by_rank(polish, [basis @ basis.mT for basis in bases])
    for axis, root, basis, each in zip(axes, roots, bases, smoothed, strict=True):
        rank, length = axis.basis.shape[1:]
        basis = root @ basis
        spectrum = basis @ each.y.mT
        spectrum = (spectrum + spectrum.mT) * (each.size / 2)[:, None, None]
        rest = (each.trace - _trace(spectrum)) / (length - rank)
        rest = torch.maximum(rest, each.shift)
        good = rest.isfinite() & each.size.isfinite() & (each.size > smallest(rest.dtype))
        if left_out is not None:
            good = good & ~left_out
        _select_(axis.basis, good[:, None, None], basis)
        _select_(axis.spectrum, good[:, None, None], spectrum)
        _select_(axis.rest, good, rest)
        refresh_multiplier(axis)
        axis.scatter = None


def refresh_multiplier(axis: AxisBatch) -> None:
    """V, or I - R'V, from R, Lambda and rho; I where there is nothing yet."""
    rank, length = axis.basis.shape[1:]
    trace = _trace(axis.spectrum) + (length - rank) * axis.rest
    known = trace > 0
    beta0 = torch.where(known, axis.alpha / length * trace, 1.0)
    damped = axis.spectrum + torch.diag_embed(beta0[:, None].expand(-1, rank))
    # Positive definite, so that cholesky_ex, which does not wait to tell, needs no check.
    factor = torch.linalg.cholesky_ex(damped).L
    eye = torch.eye(rank, dtype=factor.dtype, device=factor.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    middle = eye - (axis.rest + beta0)[:, None, None] * (root.mT @ root)
    middle = torch.where(known[:, None, None], middle, 0.0)
    if axis.whole:
        torch.bmm(axis.basis.mT, middle @ axis.basis, out=axis.multiplier)
        axis.multiplier.neg_().diagonal(dim1=1, dim2=2).add_(1)
    else:
        torch.bmm(middle, axis.basis, out=axis.multiplier)


def inverse_root(z: Tensor) -> Tensor:
    """Z^-1/2 of symmetric positive matrices (B, r, r).

    Up to 1e-3, and less exact for eigenvalues near the rounding of the largest: `polish` follows.
    """
    size = torch.linalg.matrix_norm(z)[:, None, None]
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    # What rounding has made of the smallest eigenvalues must not be negative.
    z = z / size + 16 * torch.finfo(z.dtype).eps * eye
    return to_polar_factor(z, TO_THE_ROOT) * size.rsqrt()


def to_polar_factor(z: Tensor, polynomials) -> Tensor:
    """What takes Y to its polar factor, where Z = YY' (B, r, r) has eigenvalues up to about 1.

    Each polynomial gives p(Y) = (a I + b YY' + c (YY')^2) Y: the product of the brackets, in which
    only Z appears, is the result. All of them are polynomials of Z and commute.
    """
    eye, root = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device), None
    for number, (a, b, c) in enumerate(polynomials):
        bracket = torch.baddbmm(b * z, z, z, alpha=c) + a * eye
        root = bracket if root is None else bracket @ root
        if number + 1 < len(polynomials):
            z = bracket @ z @ bracket
    return root


def polish(z: Tensor) -> Tensor:
    """The same for Z not far from I: what is left to do after `inverse_root`.

    In float32 the smallest directions that DELTA allows have squares at the rounding of the
    largest; they come out of `inverse_root` with a length of about 0.6, and of this with 1.
    """
    return to_polar_factor(z, POLISH)


@dataclass
class _Smoothed:
    """y: Y / |Y|, (B, r, D). size: |Y|, trace: tr T, shift: eta delta |R S|, (B,) each."""

    y: Tensor
    size: Tensor
    trace: Tensor
    shift: Tensor


def _smoothed_scatter(axis: AxisBatch) -> _Smoothed:
    """Y = R T"""
    rank, length = axis.basis.shape[1:]
    product, scale = axis.scatter.product, axis.scatter.scale
    shift = axis.eta * DELTA * scale * size_of(product)
    y = torch.baddbmm(
        torch.addcmul(
            (axis.eta * scale)[:, None, None] * product, shift[:, None, None], axis.basis
        ),
        axis.spectrum, axis.basis, alpha=1 - axis.eta,
    )  # fmt: skip
    size = size_of(y)
    trace = axis.eta * axis.scatter.trace + shift * length
    trace = trace + (1 - axis.eta) * (_trace(axis.spectrum) + (length - rank) * axis.rest)
    return _Smoothed(y / size[:, None, None], size, trace, shift)


def _by_rank(function: Callable, matrices: list[Tensor]) -> list[Tensor]:
    """`function` of each (B, r, r), together where they have the same r."""
    roots: list[Tensor] = [None] * len(matrices)
    for rank in {matrix.shape[-1] for matrix in matrices}:
        chosen = [i for i, matrix in enumerate(matrices) if matrix.shape[-1] == rank]
        counts = [len(matrices[i]) for i in chosen]
        stacked = function(torch.cat([matrices[i] for i in chosen]))
        for i, root in zip(chosen, stacked.split(counts), strict=True):
            roots[i] = root
    return roots


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _select_(target: Tensor, condition: Tensor, new: Tensor) -> None:
    torch.where(condition, new, target, out=target)
