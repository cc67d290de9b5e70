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

from utils.optim.ngd.fisher import DELTA, smallest
from utils.optim.ngd.inverse_root import inverse_root, polish

FISHER = ("basis", "spectrum", "rest")  # of one axis: state keys are `basis_0`, ...


@dataclass
class AxisBatch:
    """One axis, of length D, of B tensors.

    Attributes:
        dim: of the axis in the stacked gradients, whose dimension 0 is the tensors.
        alpha, eta: settings.
        basis: R, (B, r, D). spectrum: Lambda, (B, r, r). rest: rho, (B,).
        multiplier: see `multiplier`.
        scatter: of the last gradient, where it is to be taken up by `update_`.
        own: the tensors among the B that this process updates; None: all of them.
        is_shared: other ranks update others: who shares the results makes the multiplier anew.
    """

    dim: int
    alpha: float
    eta: float
    basis: Tensor
    spectrum: Tensor
    rest: Tensor
    scatter: Scatter | None = None
    own: slice | None = None
    is_shared: bool = False

    def __post_init__(self):
        self.own = slice(0, len(self.rest)) if self.own is None else self.own
        self.whole = is_whole(*self.basis.shape[1:])
        self.multiplier = multiplier(self.basis, self.spectrum, self.rest, self.alpha)

    @property
    def is_ours(self) -> bool:
        """Whether this process updates any of its tensors."""
        return self.own.start < self.own.stop

    def set_alpha(self, alpha: float) -> None:
        if alpha != self.alpha:
            self.alpha = alpha
            self.multiplier = multiplier(self.basis, self.spectrum, self.rest, alpha)


@dataclass
class Scatter:
    """Of the B tensors that this process updates. product: R X'X, (B, r, D). scale: (B,), by which
    X'X is multiplied to give S. trace: tr(S), (B,)."""

    product: Tensor
    scale: Tensor
    trace: Tensor


def is_whole(rank: int, length: int) -> bool:
    """Whether a gradient is multiplied by I - R'V, not by V and R one after the other."""
    return 2 * rank >= length


def precondition_(
    x: Tensor, axis: AxisBatch, other: Tensor | None, square: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The stacked gradients x (B, ...) times I - R'V along `axis`; they are not scaled.

    Args:
        other: memory like x, for the result where `axis.whole`; else that takes the place of x.
        square: (B,) squared norms of the gradients as they came, where the axis is to be updated:
            what the update needs of x is noted in `axis.scatter`. F is of gradients scaled to the
            norm that they had: the axes before leave their mark on directions alone.

    Returns:
        (result, the memory that is free now)
    """
    tensors, _, length = axis.multiplier.shape
    before, after = x.shape[1 : axis.dim].numel(), x.shape[axis.dim + 1 :].numel()
    turned, multiplier = x.movedim(axis.dim, -1), axis.multiplier
    # Repeated matrices must not take more memory than the gradients.
    last, copied = after == 1, before > 1 and 1 < after < multiplier.shape[1]
    if copied:
        last, seen = True, turned.reshape(tensors, -1, length)
    else:
        if last:
            before, after = 1, before
        seen = x.view(tensors * before, *((after, length) if last else (length, after)))
        if before > 1:
            multiplier = multiplier.repeat_interleave(before, 0)
    if not axis.whole:
        basis = axis.basis if len(seen) == tensors else axis.basis.repeat_interleave(before, 0)
        small = seen @ basis.mT if last else basis @ seen  # H
    if square is not None:
        own, each = axis.own, len(seen) // tensors
        ours = slice(own.start * each, own.stop * each)
        if axis.whole:
            product = seen[ours].mT @ seen[ours] if last else seen[ours] @ seen[ours].mT
        elif last:
            product = small[ours].mT @ seen[ours]
        else:
            product = _times_transposed(small[ours], seen[ours])
        if each > 1:
            product = product.view(-1, each, *product.shape[1:]).sum(1)
        if axis.whole:
            product = axis.basis[own] @ product
        share, now, square = length / x[0].numel(), square_norms(x[own]), square[own]  # 1 / N
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


def _times_transposed(small: Tensor, x: Tensor) -> Tensor:
    """small x', (B, r, D)"""
    if len(x) > 1:
        return small @ x.mT
    return (x @ small.mT).mT.contiguous()  # ten times faster here, where factors are rounded


def square_norms(x: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1).square()


def update_(axes: list[AxisBatch], left_out: Tensor | None) -> None:
    """All axes take up the scatter that `precondition_` has noted, each for its `own` tensors.

    Args:
        left_out: () bool; where true, all stay as they are.
    """
    alike: dict[tuple, list[AxisBatch]] = {}  # as one, since many small operations are slow
    for axis in axes:
        alike.setdefault((axis.basis.shape[1:], axis.alpha, axis.eta), []).append(axis)
    smoothed = [_Smoothed(members) for members in alike.values()]
    roots = _by_rank(inverse_root, [each.y @ each.y.mT for each in smoothed])
    bases = [root @ each.y for root, each in zip(roots, smoothed, strict=True)]
    roots = _by_rank(polish, [basis @ basis.mT for basis in bases])
    for root, basis, each in zip(roots, bases, smoothed, strict=True):
        basis = root @ basis
        spectrum = basis @ each.y.mT
        spectrum = (spectrum + spectrum.mT) * (each.size / 2)[:, None, None]
        rank, length = basis.shape[1:]
        rest = (each.trace - _trace(spectrum)) / (length - rank)
        rest = torch.maximum(rest, each.shift)
        good = rest.isfinite() & each.size.isfinite() & (each.size > smallest(rest.dtype))
        if left_out is not None:
            good = good & ~left_out
        each.take_up(good, basis, spectrum, rest)


class _Smoothed:
    """Y = R T of axes that are alike, B tensors in all.

    Attributes:
        y: Y / |Y|, (B, r, D). size: |Y|, trace: tr T, shift: eta delta |R S|, (B,) each.
    """

    def __init__(self, axes: list[AxisBatch]):
        self.axes, eta = axes, axes[0].eta
        self.basis, self.spectrum, self.rest = (
            _joined([getattr(axis, name)[axis.own] for axis in axes]) for name in FISHER
        )
        product, scale, trace = (
            _joined([getattr(axis.scatter, name) for axis in axes])
            for name in ("product", "scale", "trace")
        )
        rank, length = self.basis.shape[1:]
        # In the memory of one product: fresh memory is slow.
        r_scatter = scale * normalize_(product)  # |R S|
        self.shift = eta * DELTA * r_scatter
        inner = (1 - eta) * self.spectrum
        inner.diagonal(dim1=1, dim2=2).add_(self.shift[:, None])
        self.y = product.mul_((eta * r_scatter)[:, None, None]).baddbmm_(inner, self.basis)
        self.size = normalize_(self.y)
        before = _trace(self.spectrum) + (length - rank) * self.rest
        self.trace = eta * trace + self.shift * length + (1 - eta) * before

    def take_up(self, good: Tensor, *new: Tensor) -> None:
        """R, Lambda and rho become `new` where `good` (B,)."""
        matrices = good[:, None, None]
        new = [
            torch.where(condition, value, old)
            for condition, value, old in zip(
                (matrices, matrices, good), new, (self.basis, self.spectrum, self.rest), strict=True
            )
        ]
        names = FISHER
        if not self.axes[0].is_shared:
            new.append(multiplier(*new, self.axes[0].alpha))
            names = (*FISHER, "multiplier")
        counts = [axis.own.stop - axis.own.start for axis in self.axes]
        for axis, *values in zip(self.axes, *(value.split(counts) for value in new), strict=True):
            for name, value in zip(names, values, strict=True):
                getattr(axis, name)[axis.own].copy_(value)
            axis.scatter = None


def renew_multipliers_(axes: list[AxisBatch]) -> None:
    """Of axes whose Fisher matrices have become others."""
    alike: dict[tuple, list[AxisBatch]] = {}
    for axis in axes:
        alike.setdefault((axis.basis.shape[1:], axis.alpha), []).append(axis)
    for (_, alpha), members in alike.items():
        matrices = [_joined([getattr(axis, name) for axis in members]) for name in FISHER]
        new = multiplier(*matrices, alpha).split([len(axis.rest) for axis in members])
        for axis, value in zip(members, new, strict=True):
            axis.multiplier.copy_(value)


def multiplier(basis: Tensor, spectrum: Tensor, rest: Tensor, alpha: float) -> Tensor:
    """V (B, r, D), or I - R'V (B, D, D) where `is_whole`; I where there is nothing yet."""
    rank, length = basis.shape[1:]
    trace = _trace(spectrum) + (length - rank) * rest
    known = trace > 0
    beta0 = torch.where(known, alpha / length * trace, 1.0)
    damped = spectrum + torch.diag_embed(beta0[:, None].expand(-1, rank))
    # Positive definite, so that cholesky_ex, which does not wait to tell, needs no check.
    factor = torch.linalg.cholesky_ex(damped).L
    eye = torch.eye(rank, dtype=factor.dtype, device=factor.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    middle = eye - (rest + beta0)[:, None, None] * (root.mT @ root)
    v = torch.where(known[:, None, None], middle, 0.0) @ basis
    if not is_whole(rank, length):
        return v
    product = (basis.mT @ v).neg_()
    product.diagonal(dim1=1, dim2=2).add_(1)
    return product


def _by_rank(function: Callable, matrices: list[Tensor]) -> list[Tensor]:
    """`function` of each (B, r, r), together where they have the same r."""
    roots: list[Tensor] = [None] * len(matrices)
    for rank in {matrix.shape[-1] for matrix in matrices}:
        chosen = [i for i, matrix in enumerate(matrices) if matrix.shape[-1] == rank]
        counts = [len(matrices[i]) for i in chosen]
        stacked = function(_joined([matrices[i] for i in chosen]))
        for i, root in zip(chosen, stacked.split(counts), strict=True):
            roots[i] = root
    return roots


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def normalize_(matrices: Tensor) -> Tensor:
    """Divides each of (B, r, D) by its Frobenius norm, which it returns, (B,); as `size_of` in
    fisher.py, without squares that leave the range of the dtype. Zeros stay."""
    tiny = torch.finfo(matrices.dtype).tiny
    largest = torch.maximum(matrices.amax((1, 2)), -matrices.amin((1, 2))).clamp_min(tiny)
    norms = torch.linalg.matrix_norm(matrices.div_(largest[:, None, None]))
    matrices.div_(norms.clamp_min(tiny)[:, None, None])
    return largest * norms


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
