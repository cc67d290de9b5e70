"""The Fisher matrices of many tensors at once, without host syncs.

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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fisher import DELTA, smallest
from .inverse_root import add_to_diagonal_, inverse_root, polish, polished_root
from .joined import Layout, joined

FISHER = ("basis", "spectrum", "rest")  # fields of an axis; the state's keys are `basis_0`, ...


@dataclass
class AxisBatch:
    """One axis, of length D, of B tensors.

    Attributes:
        dim: the axis's dimension in the stacked gradients, whose dimension 0 is the tensors.
        alpha, eta, power: see `fisher.py`.
        basis: R, (B, r, D). spectrum: Lambda, (B, r, r). rest: rho, (B,).
        multiplier: V (B, r, D), or I - R'V (B, D, D) where `whole`; `renew_multipliers_` makes it.
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

    @property
    def settings(self) -> tuple:
        """Equal for axes that can be updated together."""
        return self.alpha, self.eta, self.power

    @property
    def is_ours(self) -> bool:
        """Whether this process updates any of the tensors."""
        return self.own.start < self.own.stop


@dataclass
class Scatter:
    """The scatter S of the tensors that this process updates, from the gradients that this axis
    received."""

    product: Tensor  # R X'X, (B, r, D); X'X, (B, D, D), where the axis is `whole`
    norm: Tensor  # |X|, (B,)
    gradient_norm: Tensor  # |X| before the axes before this one; tr(S) is its square by N, (B,)
    rows: float  # N


def is_whole(fisher_rank: int, length: int) -> bool:
    """Whether gradients are multiplied by the full matrix I - R'V, not by R and V in turn."""
    return 2 * fisher_rank >= length


class Product:
    """Multiplies stacked gradients x (B, ...) by I - R'V along `axis`, without rescaling them. Its
    views of x are made once, since each costs the host as much time as a product.

    Args:
        other: memory like x, for the result where `axis.whole`; otherwise the result overwrites x.

    Attributes:
        result, unused: one of x and `other` each.
    """

    def __init__(self, x: Tensor, axis: AxisBatch, other: Tensor | None):
        self.axis, (tensors, rows, length) = axis, axis.multiplier.shape
        before, after = x.shape[1 : axis.dim].numel(), x.shape[axis.dim + 1 :].numel()
        # Copy x where repeating the matrices would take more memory than the gradients.
        self.copied = before > 1 and 1 < after < rows
        self.last = self.copied or after == 1
        self.per_tensor = 1 if self.last else before
        many = (tensors, before * after, length)
        self.shape = many if self.last else (tensors * before, length, after)
        self.x, self.axis_last = x.view(tensors, -1), x.movedim(axis.dim, -1)
        self.matrices = None if self.copied else x.view(self.shape)
        self.out = other.view(self.shape) if axis.whole else None
        swapped = axis.whole and not self.copied
        self.result, self.unused = (other, x) if swapped else (x, other)

    def take(self, gradient_norm: Tensor | None = None, norm: Tensor | None = None) -> None:
        """Computes `result`.

        Args:
            gradient_norm: (B,) norms of the original gradients, if the axis is to be updated: then
                x's scatter is stored in `axis.scatter`. It is that of x rescaled to the original
                norm, so that the axes before this one affect only the direction.
            norm: (B,) norms of x, where they are known.
        """
        axis, last, own = self.axis, self.last, self.axis.own
        x = self.axis_last.reshape(self.shape) if self.matrices is None else self.matrices
        multiplier = self._repeated(axis.multiplier)
        if not axis.whole:
            basis = self._repeated(axis.basis)
            h = torch.bmm(x, basis.mT) if last else torch.bmm(basis, x)
        if gradient_norm is not None:
            ours = slice(own.start * self.per_tensor, own.stop * self.per_tensor)
            own_x = part_of(x, ours)
            if axis.whole:
                product = torch.bmm(own_x.mT, own_x) if last else torch.bmm(own_x, own_x.mT)
            elif last:
                product = torch.bmm(part_of(h, ours).mT, own_x)
            else:
                product = _times_transposed(part_of(h, ours), own_x)
            if self.per_tensor > 1:
                product = product.view(-1, self.per_tensor, *product.shape[1:]).sum(1)
            norm = norms(part_of(self.x, own)) if norm is None else part_of(norm, own)
            rows = self.x.shape[1] / axis.basis.shape[2]
            axis.scatter = Scatter(product, norm, part_of(gradient_norm, own), rows)
        if axis.whole:
            factors = (x, multiplier) if last else (multiplier.mT, x)
            x = torch.bmm(*factors, out=self.out)
        else:
            x.baddbmm_(*((h, multiplier) if last else (multiplier.mT, h)), alpha=-1)
        if self.copied:
            self.axis_last.copy_(x.view(self.axis_last.shape))

    def _repeated(self, matrices: Tensor) -> Tensor:
        return matrices.repeat_interleave(self.per_tensor, 0) if self.per_tensor > 1 else matrices


def part_of(tensor: Tensor, part: slice) -> Tensor:
    """tensor[part], without an operation where that is all of it."""
    return tensor if (part.start, part.stop) == (0, len(tensor)) else tensor[part]


def _times_transposed(h: Tensor, x: Tensor) -> Tensor:
    """h x', (B, r, D)"""
    if len(x) > 1:
        return torch.bmm(h, x.mT)
    # Ten times faster for one matrix where inputs are rounded.
    return torch.bmm(x, h.mT).mT.contiguous()


def norms(x: Tensor) -> Tensor:
    """(B, ...) -> (B,)"""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def update_(axes: list[AxisBatch], left_out: Tensor | None) -> None:
    """Updates all axes, each for its `own` tensors, with the scatters from `Product`.

    Args:
        left_out: () bool; where true, nothing changes.
    """
    alike: dict[tuple, list[AxisBatch]] = {}
    for axis in axes:
        alike.setdefault((*axis.settings, axis.is_shared), []).append(axis)
    for members in alike.values():
        matrices = _Joined(members, [axis.own for axis in members])
        matrices.update_(left_out)
        if not members[0].is_shared:
            matrices.renew_multipliers_()


def renew_multipliers_(axes: list[AxisBatch]) -> None:
    """Recomputes the multipliers of axes from their Fisher matrices."""
    alike: dict[tuple, list[AxisBatch]] = {}
    for axis in axes:
        alike.setdefault(axis.settings, []).append(axis)
    for members in alike.values():
        everything = [slice(0, len(axis.rest)) for axis in members]
        _Joined(members, everything).renew_multipliers_()


class _Joined:
    """Fisher matrices of axes with the same settings, B tensors in all, joined as `Layout` says.

    Attributes:
        basis: R, a tensor (B', r, D) for each shape.
        spectrum: Lambda, a tensor (B', s, s) for each size.
        rest: rho, (B,).
    """

    def __init__(self, axes: list[AxisBatch], parts: list[slice]):
        """parts: which tensors of each axis."""
        ordered = sorted(zip(axes, parts, strict=True), key=lambda pair: pair[0].basis.shape[1:])
        self.axes = [axis for axis, _ in ordered]
        shapes = [tuple(axis.basis.shape[1:]) for axis in self.axes]
        counts = [part.stop - part.start for _, part in ordered]
        self.layout = Layout(shapes, counts, axes[0].rest.device)
        # Views of the axes' own.
        self._of_axes = [
            [part_of(getattr(axis, name), part) for axis, part in ordered] for name in FISHER
        ]
        basis, spectrum, rest = self._of_axes
        self.basis = self.layout.to_shapes(basis)
        self.spectrum = self.layout.to_sizes(self.layout.to_shapes(spectrum))
        self.rest = joined(rest)

    def update_(self, left_out: Tensor | None) -> None:
        """One step of subspace iteration, see `fisher.py`.

        All scatters are in units of u = eta tr S + (1 - eta) tr F, about tr T: then |Y| is at most
        about 1, and its square does not overflow.
        """
        layout, eta = self.layout, self.axes[0].eta
        y, norm, gradient_norm, rows = self._take_scatters()
        trace = gradient_norm.square()
        torch._foreach_div_(trace.split(layout.counts), rows)  # tr S
        unit = torch.lerp(self._trace(), trace, eta)
        factor = (trace / unit).div_(norm.square()).nan_to_num_(0.0, posinf=0.0)  # S / X'X
        for each, own in zip(y, layout.for_shapes(factor), strict=True):
            each.mul_(own)  # R S
        shift = eta * DELTA * joined([norms(each) for each in y])
        inner = _scaled(self.spectrum, layout.for_sizes((1 - eta) / unit))
        for each, own in zip(inner, layout.for_sizes(shift), strict=True):
            add_to_diagonal_(each, own[..., 0])
        for each, *factors in zip(y, layout.cut(inner), self.basis, strict=True):
            each.baddbmm_(*factors, beta=eta)  # R T

        z = layout.to_sizes([torch.bmm(each, each.mT) for each in y])
        roots = layout.cut([inverse_root(each) for each in z])
        bases = [*map(torch.bmm, roots, y)]
        near_eye = layout.to_sizes([torch.bmm(basis, basis.mT) for basis in bases])
        roots = layout.cut([polish(each) for each in near_eye])
        bases = [*map(torch.bmm, roots, bases)]
        spectra = [torch.bmm(basis, each.mT) for basis, each in zip(bases, y, strict=True)]
        spectra = layout.to_sizes(spectra)

        rest = layout.times(shift, [length for _, length in layout.shapes])
        rest = rest.sub_(_traces(spectra)).add_(1)  # tr T - tr Lambda
        rest = layout.times(rest, [1 / (length - r) for r, length in layout.shapes])
        rest = torch.maximum(rest, shift).mul_(unit)
        size = _traces(z).sqrt_().mul_(unit)  # |Y|
        good = (rest < math.inf) & (size > smallest(rest.dtype))  # and not NaN
        if left_out is not None:
            good &= ~left_out
        spectra = _scaled([each + each.mT for each in spectra], layout.for_sizes(unit / 2))
        self._store(good, bases, spectra, rest)

    def _take_scatters(self) -> tuple[list[Tensor], Tensor, Tensor, list[float]]:
        """The axes' scatters, which are used up: R X'X for each shape, |X|, |gradient|, N."""
        scatters = [axis.scatter for axis in self.axes]
        for axis in self.axes:
            axis.scatter = None
        products = self.layout.to_shapes([scatter.product for scatter in scatters])
        # In full precision, whatever that of the gradients' products: else the rounding errors of
        # the strongest direction would count as scatter in the weakest ones.
        products = [
            torch.bmm(basis, each) if is_whole(*basis.shape[1:]) else each
            for basis, each in zip(self.basis, products, strict=True)
        ]
        norm = joined([scatter.norm for scatter in scatters])
        gradient_norm = joined([scatter.gradient_norm for scatter in scatters])
        return products, norm, gradient_norm, [scatter.rows for scatter in scatters]

    def _store(
        self, good: Tensor, bases: list[Tensor], spectra: list[Tensor], rest: Tensor
    ) -> None:
        """Sets R, Lambda and rho to these where `good`, (B,)."""
        layout = self.layout
        self.basis = [*map(torch.where, layout.for_shapes(good), bases, self.basis)]
        self.spectrum = [*map(torch.where, layout.for_sizes(good), spectra, self.spectrum)]
        self.rest = torch.where(good, rest, self.rest)
        spectra = [each.contiguous() for each in layout.cut(self.spectrum)]
        new = layout.to_axes(self.basis), layout.to_axes(spectra), self.rest.split(layout.counts)
        for old, value in zip(self._of_axes, new, strict=True):
            torch._foreach_copy_(old, value)

    def renew_multipliers_(self) -> None:
        """Recomputes the axes' multipliers, by

        beta^p G^-p = I - R'V        V = (I - beta^p (Lambda + beta0 I)^-p) R      see `fisher.py`

        V = 0 while F is zero.
        """
        layout, alpha, power = self.layout, self.axes[0].alpha, self.axes[0].power
        trace = self._trace()
        unknown = ~(trace > 0)
        beta0 = layout.times(trace, [alpha / length for _, length in layout.shapes])
        beta0.masked_fill_(unknown, 1.0)
        beta = self.rest + beta0
        damped = [spectrum.clone() for spectrum in self.spectrum]
        for each, own in zip(damped, layout.for_sizes(beta0), strict=True):
            add_to_diagonal_(each, own[..., 0])
        inverses = [_inverse(each) if power == 1 else polished_root(each) for each in damped]
        factor = -(beta if power == 1 else beta.sqrt())
        middles = _scaled(inverses, layout.for_sizes(factor))
        for middle, own in zip(middles, layout.for_sizes(unknown), strict=True):
            add_to_diagonal_(middle, 1)
            middle.masked_fill_(own, 0.0)
        values = []
        for middle, basis in zip(layout.cut(middles), self.basis, strict=True):
            value = torch.bmm(middle, basis)
            if is_whole(*basis.shape[1:]):
                value = torch.bmm(basis.mT, value).neg_()
                add_to_diagonal_(value, 1)
            values.append(value)
        torch._foreach_copy_([axis.multiplier for axis in self.axes], layout.to_axes(values))

    def _trace(self) -> Tensor:
        """tr F = tr Lambda + (D - r) rho, (B,)"""
        rest = self.layout.times(self.rest, [length - r for r, length in self.layout.shapes])
        return rest.add_(_traces(self.spectrum))


def _scaled(batches: list[Tensor], factors: tuple[Tensor, ...]) -> list[Tensor]:
    return [each * factor for each, factor in zip(batches, factors, strict=True)]


def _traces(batches: list[Tensor]) -> Tensor:
    """The traces of all matrices (B', s, s) of each batch, (B,)"""
    return joined([each.diagonal(dim1=1, dim2=2).sum(-1) for each in batches])


def _inverse(matrices: Tensor) -> Tensor:
    """Inverses of symmetric positive definite matrices (B, r, r). cholesky_ex skips the error
    check: the host would wait for it, and these matrices do not need it."""
    factor = torch.linalg.cholesky_ex(matrices).L
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return torch.bmm(root.mT, root)
