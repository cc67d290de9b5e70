"""The Fisher matrix of one axis of a tensor, as used in online natural gradient descent.

Source: Povey, Zhang and Khudanpur, "Parallel training of DNNs with natural gradient and parameter
averaging" (2015), arXiv:1410.7455; the derivation is in the comments of Kaldi's
nnet3/natural-gradient-online.h, whose notation is used here. This file is the reference
implementation: one tensor and one axis at a time, with a singular value decomposition.
`batched_fisher.py` computes the same for many tensors at once without SVD, and is tested equal.

Along one axis of length D, a gradient is a matrix X of N rows and D columns, where N is the product
of all other axes. S = X'X / N is its scatter, and F a running mean of S in a low-rank form, with
rank r < D:

    F = R' Lambda R + rho (I - R'R)

R (r x D) has orthonormal rows, the tracked directions; Lambda (r x r) is the scatter within their
span, rho the mean scatter in all other directions. (The paper writes R' D R + rho I, which is the
same for the diagonal matrix Lambda = D + rho I. The choice of basis does not matter: R' Lambda R is
unchanged if an orthogonal O turns R into O R and Lambda into O Lambda O'.)

The axes of a tensor are processed in order: each axis takes as X the result of the axis before it.
With coupled weight decay, the gradient includes the decay. Each X is preconditioned by F as of the
previous gradients, and F is updated with X afterwards.

Precondition. The gradient is multiplied by the inverse of F, which is damped by alpha times its
mean diagonal element, and rescaled to its previous norm:

    G = F + (alpha / D) tr(F) I            X_hat = X G^-1 |X| / |X G^-1|

The damping adds beta0 = alpha tr(F) / D to every eigenvalue of F; in the directions that are not
tracked the sum is beta = rho + beta0. So a product of rank r is enough:

    beta G^-1 = I - R' (I - beta (Lambda + beta0 I)^-1) R

A power p other than the paper's 1 takes G^-p in the place of G^-1:

    beta^p G^-p = I - R' (I - beta^p (Lambda + beta0 I)^-p) R

With p = 1/2 the directions of large gradients are held down less. It is Adam's exponent; Shampoo
(Gupta, Koren and Singer (2018), arXiv:1802.09568) takes 1/4 on each of two axes.

Update, by one step of subspace iteration on T = eta (S + delta s I) + (1 - eta) F:

    Y = R T        Z = Y Y' = U C U'        R <- C^-1/2 U' Y        Lambda <- C^1/2

    rho <- (tr T - tr Lambda) / (D - r), so that tr F = tr T

Three differences from Kaldi. eta is a constant, where Kaldi derives it from a number of samples. F
starts at zero (then X_hat = X), not at a small constant, so that nothing depends on the scale of
the gradient; since X_hat does not change if F is scaled, the running mean needs no bias correction.
And where Kaldi puts floors on the eigenvalues, here delta s I with s = |R S| (Frobenius) is added
to the scatter: no direction falls below delta of the largest, which keeps everything positive and
the condition number of Y below about 1 / delta. (The condition number of Z is its square, which is
at the limit of float32, so delta can hardly be smaller.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DELTA = 1e-3  # smallest scatter relative to the largest; see above
MAX_DEFAULT_RANK = 80  # as in the paper


@dataclass
class Fisher:
    basis: Tensor  # R, (r, D)
    spectrum: Tensor  # Lambda, (r, r)
    rest: Tensor  # rho, ()


def default_rank(length: int) -> int:
    """Half the length of the axis, rounded up, at most MAX_DEFAULT_RANK."""
    return min((length + 1) // 2, MAX_DEFAULT_RANK)


def first_basis(rank: int, length: int, **kind) -> Tensor:
    """(rank, length) with orthonormal rows that together have no zero column.

    Row i has ones at i, i + rank, i + 2 rank, ..., the first of them slightly larger, so that no
    gradient with a simple symmetry is orthogonal to all rows (Kaldi's InitOrthonormalSpecial).
    """
    basis = torch.eye(rank, **kind).repeat(1, -(-length // rank))[:, :length]
    basis[:, :rank] *= 1.1
    return basis / basis.norm(dim=1, keepdim=True)


def zero_fisher(rank: int, length: int, **kind) -> Fisher:
    """The state before the first gradient; `kind`: dtype and device."""
    basis = first_basis(rank, length, **kind)
    return Fisher(basis, torch.zeros(rank, rank, **kind), torch.zeros((), **kind))


def precondition(x: Tensor, fisher: Fisher, alpha: float, power: float = 1.0) -> Tensor:
    """X (N, D) -> X_hat (N, D)."""
    r, lam, rho = fisher.basis, fisher.spectrum, fisher.rest
    rank, length = r.shape
    trace = lam.trace() + (length - rank) * rho
    if trace == 0 or not trace.isfinite():
        return x
    beta0 = alpha * trace / length
    eye = torch.eye(rank, dtype=x.dtype, device=x.device)
    if power == 1:
        inverse = torch.linalg.inv(lam + beta0 * eye)
    else:
        values, vectors = torch.linalg.eigh(lam + beta0 * eye)
        inverse = vectors * values**-power @ vectors.T
    middle = eye - (rho + beta0) ** power * inverse
    x_hat = x - x @ r.T @ middle @ r
    scale = x.norm() / x_hat.norm()
    return x_hat * scale if scale.isfinite() else x_hat


def update(x: Tensor, fisher: Fisher, eta: float) -> Fisher:
    """F, updated with the gradient X (N, D)."""
    r, lam, rho = fisher.basis, fisher.spectrum, fisher.rest
    (rows, length), rank = x.shape, r.shape[0]
    r_scatter = r @ x.T @ x / rows  # R S
    shift = eta * DELTA * size_of(r_scatter)
    y = eta * r_scatter + (1 - eta) * lam @ r + shift * r
    size = size_of(y)
    if not size.isfinite() or size < smallest(x.dtype):
        return fisher
    # The SVD of Y = U C^1/2 R, not the eigenvalues of Z, which would lose half of the digits.
    _, root, basis = torch.linalg.svd(y / size, full_matrices=False)
    spectrum = torch.diag(root * size)
    trace = eta * x.square().sum() / rows + shift * length
    trace = trace + (1 - eta) * (lam.trace() + (length - rank) * rho)
    rest = ((trace - spectrum.trace()) / (length - rank)).clamp_min(
        shift
    )  # below shift only by rounding
    return Fisher(basis, spectrum, rest)


def size_of(matrices: Tensor) -> Tensor:
    """Frobenius norms, (..., r, D) -> (...), scaled to avoid overflow and underflow: a scatter
    contains squares already, and the norm would square these."""
    largest = matrices.abs().amax((-2, -1), keepdim=True)
    largest = largest.clamp_min(torch.finfo(matrices.dtype).tiny)
    return largest[..., 0, 0] * torch.linalg.matrix_norm(matrices / largest)


def smallest(dtype: torch.dtype) -> float:
    """Below this, |Y| counts as zero and F is not updated. In float32, F learns from gradients with
    a mean square between about 1e-29 and 1e+37; otherwise the step is SGD's."""
    return torch.finfo(dtype).tiny * 1e8
