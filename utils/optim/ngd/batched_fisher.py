"""The Fisher matrices of many tensors of one shape at once, without host syncs.

The mathematics is that of `fisher.py`, but only with batched matrix products. Two differences:

- The eigenvectors of Z = Y Y' are not computed. With the polar decomposition Y = Lambda R, Lambda
  = Z^1/2 and R = Z^-1/2 Y, the matrix F is the same as with Lambda = C^1/2 and R = C^-1/2 U'Y, in a
  basis rotated by U. `torch.linalg.eigh` synchronizes on a GPU, and processes matrices one by one
  on a CPU; Z^-1/2 takes a fixed number of matrix products (`inverse_root`).
- The host decides nothing: an update that is not finite, or is to be skipped, is computed and then
  discarded by torch.where.

The cost of a step is in the products H = X R' and X - H V, with V = (I - beta (Lambda + beta0
I)^-1) R, which is stored between updates. Where 2 r >= D, as for short axes, the full matrix I -
R'V is stored instead: one product with it costs no more, and reads the gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.optim.ngd.fisher import DELTA, smallest
from utils.optim.ngd.inverse_root import add_to_diagonal_, inverse_root, polish

FISHER = ("basis", "spectrum", "rest")  # fields of an axis; the state's keys are `basis_0`, ...


@dataclass
class AxisBatch:
    """One axis, of length D, of B tensors.

    Attributes:
        dim: the axis's dimension in the stacked gradients, whose dimension 0 is the tensors.
        alpha, eta, power: see `fisher.py`.
        basis: R, (B, r, D). spectrum: Lambda, (B, r, r). rest: rho, (B,).
        multiplier: V (B, r, D), or I - R'V (B, D, D) where `whole`.
        whole: see `is_whole`.
        scatter: of the last gradient, until `update_` has used it; else None.
        own: which of the B tensors this process updates; None: all.
        is_shared: other ranks update the rest; whoever distributes the results recomputes
            `multiplier`.
    """

    dim: int
    alpha: float
    eta: float
    basis: Tensor
    spectrum: Tensor
    rest: Tensor
    power: float = 1.0
    scatter: Scatter | None = None
    own: slice | None = None
    is_shared: bool = False

    def __post_init__(self):
        self.own = slice(0, len(self.rest)) if self.own is None else self.own
        fisher_rank, length = self.basis.shape[1:]
        self.whole = is_whole(fisher_rank, length)
        rows = length if self.whole else fisher_rank
        self.multiplier = self.basis.new_empty(len(self.rest), rows, length)
        renew_multipliers_([self])

    @property
    def settings(self) -> tuple:
        """Equal for axes that can be updated together."""
        return self.alpha, self.eta, self.power

    @property
    def is_ours(self) -> bool:
        """Whether this process updates any of the tensors."""
        return self.own.start < self.own.stop

    def set_alpha(self, alpha: float) -> None:
        if alpha != self.alpha:
            self.alpha = alpha
            renew_multipliers_([self])


@dataclass
class Scatter:
    """The scatter S of the tensors that this process updates, from the gradients that this axis
    received."""

    product: Tensor  # R X'X, (B, r, D)
    norm: Tensor  # |X|, (B,)
    trace: Tensor  # tr(S), (B,)


def is_whole(fisher_rank: int, length: int) -> bool:
    """Whether gradients are multiplied by the full matrix I - R'V, not by R and V in turn."""
    return 2 * fisher_rank >= length


def precondition_(
    x: Tensor, axis: AxisBatch, other: Tensor | None, square: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Multiplies the stacked gradients x (B, ...) by I - R'V along `axis`, without rescaling them.

    Args:
        other: memory like x, for the result where `axis.whole`; otherwise the result overwrites x.
        square: (B,) squared norms of the original gradients, if the axis is to be updated: then
            x's scatter is stored in `axis.scatter`. It is that of x rescaled to the original norm,
            so that the axes before this one affect only the direction.

    Returns:
        (result, the memory that is now unused)
    """
    tensors, _, length = axis.multiplier.shape
    before, after = x.shape[1 : axis.dim].numel(), x.shape[axis.dim + 1 :].numel()
    axis_last, multiplier = x.movedim(axis.dim, -1), axis.multiplier
    # Copy x where repeating the matrices would take more memory than the gradients.
    last, copied = after == 1, before > 1 and 1 < after < multiplier.shape[1]
    if copied:
        last, matrices = True, axis_last.reshape(tensors, -1, length)
    else:
        if last:
            before, after = 1, before
        matrices = x.view(tensors * before, *((after, length) if last else (length, after)))
        if before > 1:
            multiplier = multiplier.repeat_interleave(before, 0)
    if not axis.whole:
        basis = axis.basis if len(matrices) == tensors else axis.basis.repeat_interleave(before, 0)
        h = matrices @ basis.mT if last else basis @ matrices
    if square is not None:
        own, per_tensor = axis.own, len(matrices) // tensors
        ours = slice(own.start * per_tensor, own.stop * per_tensor)
        if axis.whole:
            product = (
                matrices[ours].mT @ matrices[ours] if last else matrices[ours] @ matrices[ours].mT
            )
        elif last:
            product = h[ours].mT @ matrices[ours]
        else:
            product = _times_transposed(h[ours], matrices[ours])
        if per_tensor > 1:
            product = product.view(-1, per_tensor, *product.shape[1:]).sum(1)
        if axis.whole:
            product = axis.basis[own] @ product
        inverse_n = length / x[0].numel()  # 1 / N
        axis.scatter = Scatter(product, norms(x[own]), square[own] * inverse_n)
    if axis.whole:
        factors = (matrices, multiplier) if last else (multiplier.mT, matrices)
        matrices = torch.bmm(*factors, out=other.view(matrices.shape))
        if not copied:
            return other, x
    else:
        matrices.baddbmm_(*((h, multiplier) if last else (multiplier.mT, h)), alpha=-1)
    if copied:
        axis_last.copy_(matrices.view(axis_last.shape))
    return x, other


def _times_transposed(h: Tensor, x: Tensor) -> Tensor:
    """h x', (B, r, D)"""
    if len(x) > 1:
        return h @ x.mT
    return (x @ h.mT).mT.contiguous()  # ten times faster for one matrix where inputs are rounded


def norms(x: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1)


def update_(axes: list[AxisBatch], left_out: Tensor | None) -> None:
    """Updates all axes, each for its `own` tensors, with the scatters from `precondition_`.

    Args:
        left_out: () bool; where true, nothing changes.
    """
    alike: dict[tuple, list[AxisBatch]] = {}  # batched, since many small operations are slow
    for axis in axes:
        alike.setdefault((axis.basis.shape[1:], *axis.settings), []).append(axis)
    smoothed = [_Smoothed(members) for members in alike.values()]
    roots = _batched_by_size(inverse_root, [each.y @ each.y.mT for each in smoothed])
    bases = [root @ each.y for root, each in zip(roots, smoothed, strict=True)]
    roots = _batched_by_size(polish, [basis @ basis.mT for basis in bases])
    for root, basis, each in zip(roots, bases, smoothed, strict=True):
        basis = root @ basis
        spectrum = basis @ each.y.mT
        spectrum = (spectrum + spectrum.mT) * (each.size / 2)[:, None, None]
        fisher_rank, length = basis.shape[1:]
        rest = (each.trace - _trace(spectrum)) / (length - fisher_rank)
        rest = torch.maximum(rest, each.shift)
        good = rest.isfinite() & each.size.isfinite() & (each.size > smallest(rest.dtype))
        if left_out is not None:
            good = good & ~left_out
        each.store(good, basis, spectrum, rest)
    renew_multipliers_([axis for axis in axes if not axis.is_shared])


class _Smoothed:
    """Y = R T for axes with the same shapes and settings, B tensors in all.

    Attributes:
        y: Y / |Y|, (B, r, D).
        size, trace, shift: |Y|, tr T and eta delta |R S|, (B,) each.
    """

    def __init__(self, axes: list[AxisBatch]):
        self.axes, eta = axes, axes[0].eta
        self.basis, self.spectrum, self.rest = (
            _joined([getattr(axis, name)[axis.own] for axis in axes]) for name in FISHER
        )
        product, norm, trace = (
            _joined([getattr(axis.scatter, name) for axis in axes])
            for name in ("product", "norm", "trace")
        )
        scale = torch.where(norm > 0, trace / norm.square(), 0.0)  # S / X'X
        fisher_rank, length = self.basis.shape[1:]
        # Computed in the memory of `product`, since newly allocated memory is slow.
        r_scatter_norm = scale * normalize_(product)  # |R S|
        self.shift = eta * DELTA * r_scatter_norm
        inner = (1 - eta) * self.spectrum
        add_to_diagonal_(inner, self.shift[:, None])
        self.y = product.mul_((eta * r_scatter_norm)[:, None, None]).baddbmm_(inner, self.basis)
        self.size = normalize_(self.y)
        old_trace = _trace(self.spectrum) + (length - fisher_rank) * self.rest
        self.trace = eta * trace + self.shift * length + (1 - eta) * old_trace

    def store(self, good: Tensor, *new: Tensor) -> None:
        """Sets R, Lambda and rho to `new` where `good`, (B,)."""
        matrices = good[:, None, None]
        new = [
            torch.where(condition, value, old)
            for condition, value, old in zip(
                (matrices, matrices, good), new, (self.basis, self.spectrum, self.rest), strict=True
            )
        ]
        counts = [axis.own.stop - axis.own.start for axis in self.axes]
        for name, value in zip(FISHER, new, strict=True):
            own = [getattr(axis, name)[axis.own] for axis in self.axes]
            torch._foreach_copy_(own, value.split(counts))
        for axis in self.axes:
            axis.scatter = None


def renew_multipliers_(axes: list[AxisBatch]) -> None:
    """Recomputes the multipliers of axes from their Fisher matrices, by

    beta^p G^-p = I - R'V        V = (I - beta^p (Lambda + beta0 I)^-p) R        see `fisher.py`
    """
    alike: dict[tuple, list[AxisBatch]] = {}
    for axis in axes:
        alike.setdefault((axis.basis.shape[1:], axis.alpha, axis.power), []).append(axis)
    groups = [_Damped(members) for members in alike.values()]
    by_cholesky = [group for group in groups if group.power == 1]
    by_root = [group for group in groups if group.power == 0.5]
    for group in by_cholesky:
        group.renew_(_inverse(group.damped))
    roots = _batched_by_size(inverse_root, [group.damped for group in by_root])
    near_eye = [root @ group.damped @ root for root, group in zip(roots, by_root, strict=True)]
    polished = _batched_by_size(polish, near_eye)
    for group, root, other in zip(by_root, roots, polished, strict=True):
        group.renew_(other @ root)


class _Damped:
    """Lambda + beta0 I of axes with the same shapes and settings, B tensors in all.

    Attributes:
        damped: (B, r, r); I while F is zero.
        factor: beta^p, (B, 1, 1).
        known: whether F is not zero, (B, 1, 1).
    """

    def __init__(self, axes: list[AxisBatch]):
        self.axes, self.power = axes, axes[0].power
        self.basis, spectrum, rest = (
            _joined([getattr(axis, name) for axis in axes]) for name in FISHER
        )
        fisher_rank, length = self.basis.shape[1:]
        trace = _trace(spectrum) + (length - fisher_rank) * rest
        known = trace > 0
        beta0 = torch.where(known, axes[0].alpha / length * trace, 1.0)
        self.damped = spectrum.clone()
        add_to_diagonal_(self.damped, beta0[:, None])
        beta = rest + beta0
        self.factor = (beta if self.power == 1 else beta.sqrt())[:, None, None]
        self.known = known[:, None, None]

    def renew_(self, inverse: Tensor) -> None:
        """Sets the axes' multipliers from (Lambda + beta0 I)^-p: V = (I - beta^p inverse) R, or
        I - R'V where `is_whole`. V = 0 while F is zero."""
        middle = -self.factor * inverse
        add_to_diagonal_(middle, 1)
        value = torch.where(self.known, middle, 0.0) @ self.basis
        if self.axes[0].whole:
            value = (self.basis.mT @ value).neg_()
            add_to_diagonal_(value, 1)
        values = value.split([len(axis.rest) for axis in self.axes])
        torch._foreach_copy_([axis.multiplier for axis in self.axes], values)


def _inverse(matrices: Tensor) -> Tensor:
    """Inverses of symmetric positive definite matrices (B, r, r). cholesky_ex skips the error
    check: the host would wait for it, and these matrices do not need it."""
    factor = torch.linalg.cholesky_ex(matrices).L
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return root.mT @ root


def _batched_by_size(function: Callable, matrices: list[Tensor]) -> list[Tensor]:
    """Applies `function` to each (B, r, r), batching those with the same r."""
    roots: list[Tensor] = [None] * len(matrices)
    for size in {matrix.shape[-1] for matrix in matrices}:
        chosen = [i for i, matrix in enumerate(matrices) if matrix.shape[-1] == size]
        counts = [len(matrices[i]) for i in chosen]
        stacked = function(_joined([matrices[i] for i in chosen]))
        for i, root in zip(chosen, stacked.split(counts), strict=True):
            roots[i] = root
    return roots


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def normalize_(matrices: Tensor) -> Tensor:
    """Divides each matrix of (B, r, D) by its Frobenius norm and returns the norms, (B,). Scaled
    like `size_of` in fisher.py to avoid overflow and underflow; zero matrices stay zero."""
    tiny = torch.finfo(matrices.dtype).tiny
    largest = torch.maximum(matrices.amax((1, 2)), -matrices.amin((1, 2))).clamp_min(tiny)
    scaled_norms = torch.linalg.matrix_norm(matrices.div_(largest[:, None, None]))
    matrices.div_(scaled_norms.clamp_min(tiny)[:, None, None])
    return largest * scaled_norms


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
