"""The Fisher matrix of one axis of a tensor, as used in online natural gradient descent: the
equations, and where they start.

Source: Povey, Zhang and Khudanpur, "Parallel training of DNNs with natural gradient and parameter
averaging" (2015), arXiv:1410.7455; the derivation is in the comments of Kaldi's
nnet3/natural-gradient-online.h, whose notation is used here. `batched_fisher.py` computes them for
many tensors at once, and is tested against them as they stand here, in float64.

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

import torch
from torch import Tensor

DELTA = 1e-3  # smallest scatter relative to the largest; see above
MAX_DEFAULT_RANK = 80  # as in the paper


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


def zero_fisher(rank: int, length: int, **kind) -> dict[str, Tensor]:
    """R, Lambda and rho before the first gradient; `kind`: dtype and device."""
    return {
        "basis": first_basis(rank, length, **kind),  # (r, D)
        "spectrum": torch.zeros(rank, rank, **kind),  # (r, r)
        "rest": torch.zeros((), **kind),  # ()
    }


def smallest(dtype: torch.dtype) -> float:
    """Below this, |Y| counts as zero and F is not updated. In float32, F learns from gradients with
    a mean square between about 1e-29 and 1e+37; otherwise the step is SGD's."""
    return torch.finfo(dtype).tiny * 1e8
