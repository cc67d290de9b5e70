"""The Fisher matrix of one axis of a tensor, as online natural gradient keeps it.

Source: Povey, Zhang and Khudanpur, "Parallel training of DNNs with natural gradient and parameter
averaging" (2015), arXiv:1410.7455; the mathematics is worked out in the comments of Kaldi's
nnet3/natural-gradient-online.h, whose notation is used here. This file is the definition, for one
tensor and one axis at a time, with a singular-value decomposition; `batched_fisher.py` computes
the same for many tensors at once without one, and is tested equal.

A gradient is seen along one axis of length D as a matrix X of N rows and D columns, N being all
other axes together. S = X'X / N is its scatter, and F a running mean of S, of which only a part of
rank r < D is kept exactly:

    F = R' Lambda R + rho (I - R'R)

R (r x D) has orthonormal rows, the tracked directions; Lambda (r x r) is the scatter within them,
rho the mean scatter in all others. (The paper writes R' D R + rho I, which is the same with
Lambda = D + rho I diagonal. Nothing depends on the basis: R'Lambda R does not change when R is
rotated to O R and Lambda to O Lambda O'.)

Several axes follow one another: the X of each is the gradient as the axes before have made it. With
coupled weight decay the gradient is that of the loss with the decay. Each X is preconditioned by
the F of the gradients before it, and taken up afterwards.

Precondition. The gradient is multiplied by the inverse of F, smoothed by alpha times its own mean
diagonal element, and scaled back to the norm that it had:

    G = F + (alpha / D) tr(F) I            X_hat = X G^-1 |X| / |X G^-1|

With beta0 = alpha tr(F) / D and beta = rho + beta0 this takes a product of rank r only:
beta G^-1 = I - R' (I - beta (Lambda + beta0 I)^-1) R.

Update, by one step of subspace iteration on T = eta (S + delta s I) + (1 - eta) F:

    Y = R T        Z = Y Y' = U C U'        R <- C^-1/2 U' Y        Lambda <- C^1/2

    rho <- (tr T - tr Lambda) / (D - r), so that tr F = tr T

Three things differ from Kaldi's. eta is a constant; Kaldi's follows from a number of samples. F
starts at zero (then X_hat = X) instead of at a small number, so that nothing depends on the scale
of the gradient; as G only depends on F up to a factor, the running mean needs no correction for
its start. And where Kaldi sets floors to the eigenvalues, delta s I with s = |R S| (Frobenius) is
added to the scatter: no direction falls below delta of the largest, which keeps everything positive
and the condition of Y below about 1 / delta. (That of Z, its square, is then at the limit of
float32, and delta can hardly be smaller.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DELTA = 1e-3  # smallest scatter relative to the largest; see above
LARGEST_RANK = 80  # of the default rank, as in the paper


@dataclass
class Fisher:
    """basis: R, (r, D). spectrum: Lambda, (r, r). rest: rho, ()."""

    basis: Tensor
    spectrum: Tensor
    rest: Tensor


def default_rank(length: int) -> int:
    """Of an axis: half its length, up to 80."""
    return min((length + 1) // 2, LARGEST_RANK)


def first_basis(rank: int, length: int, **kind) -> Tensor:
    """(rank, length) with orthonormal rows that reach every element of the axis.

    Row i has ones at i, i + rank, i + 2 rank, ..., the first of them a little larger, so that no
    simple symmetry of a gradient is orthogonal to all rows (Kaldi's InitOrthonormalSpecial).
    """
    basis = torch.eye(rank, **kind).repeat(1, -(-length // rank))[:, :length]
    basis[:, :rank] *= 1.1
    return basis / basis.norm(dim=1, keepdim=True)


def zero_fisher(rank: int, length: int, **kind) -> Fisher:
    """The state before the first gradient; `kind`: dtype and device."""
    basis = first_basis(rank, length, **kind)
    return Fisher(basis, torch.zeros(rank, rank, **kind), torch.zeros((), **kind))


def precondition(x: Tensor, fisher: Fisher, alpha: float) -> Tensor:
    """X_hat (N, D) of X (N, D)."""
    r, lam, rho = fisher.basis, fisher.spectrum, fisher.rest
    rank, length = r.shape
    trace = lam.trace() + (length - rank) * rho
    if trace == 0 or not trace.isfinite():
        return x
    beta0 = alpha * trace / length
    eye = torch.eye(rank, dtype=x.dtype, device=x.device)
    middle = eye - (rho + beta0) * torch.linalg.inv(lam + beta0 * eye)
    x_hat = x - x @ r.T @ middle @ r
    scale = x.norm() / x_hat.norm()
    return x_hat * scale if scale.isfinite() else x_hat


def update(x: Tensor, fisher: Fisher, eta: float) -> Fisher:
    """F after the gradient X (N, D)."""
    r, lam, rho = fisher.basis, fisher.spectrum, fisher.rest
    (rows, length), rank = x.shape, r.shape[0]
    r_scatter = r @ x.T @ x / rows  # R S
    shift = eta * DELTA * size_of(r_scatter)
    y = eta * r_scatter + (1 - eta) * lam @ r + shift * r
    size = size_of(y)
    if not size.isfinite() or size < smallest(x.dtype):
        return fisher
    # Y = U C^1/2 R: so without Z, whose eigenvalues have lost half the digits.
    _, root, basis = torch.linalg.svd(y / size, full_matrices=False)
    spectrum = torch.diag(root * size)
    trace = eta * x.square().sum() / rows + shift * length
    trace = trace + (1 - eta) * (lam.trace() + (length - rank) * rho)
    rest = ((trace - spectrum.trace()) / (length - rank)).clamp_min(shift)  # less by rounding only
    return Fisher(basis, spectrum, rest)


def size_of(matrices: Tensor) -> Tensor:
    """Frobenius norms, (..., r, D) -> (...); without squares that leave the range of the dtype,
    for a scatter has squares of gradients in it already."""
    largest = matrices.abs().amax((-2, -1), keepdim=True)
    largest = largest.clamp_min(torch.finfo(matrices.dtype).tiny)
    return largest[..., 0, 0] * torch.linalg.matrix_norm(matrices / largest)


def smallest(dtype: torch.dtype) -> float:
    """An |Y| below this is taken for nothing. With it, gradients are learned from whose squares'
    mean lies between about 1e-29 and 1e+37 in float32; beyond that the step is SGD's."""
    return torch.finfo(dtype).tiny * 1e8
