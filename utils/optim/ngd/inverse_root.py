"""Z^-1/2 of many symmetric positive matrices at once, in matrix products alone.

Nothing is decided on the host, so nothing waits for a GPU: the number of products is fixed.
"""

import torch
from torch import Tensor

# Odd polynomials a x + b x^3 + c x^5 that drive all singular values of a matrix to 1. The first six
# one after the other bring all from 0.001 to 1 there, which none can do better in as many (Amsel et
# al., "The Polar Express" (2025), arXiv:2505.16932); the last is Newton-Schulz's of fifth order,
# which converges (Higham, "Functions of matrices", 2008, ch. 8).
EXPRESS = (
    (8.287212018, -23.595886519, 17.300387313),
    (4.107059112, -2.947849917, 0.544843108),
    (3.948690853, -2.908902116, 0.551819139),
    (3.318419657, -2.488488024, 0.510048940),
    (2.300652020, -1.668903985, 0.418807312),
    (1.891301408, -1.267995827, 0.376804089),
)
CONVERGE = (15 / 8, -10 / 8, 3 / 8)
TO_THE_ROOT = (*EXPRESS, CONVERGE)
POLISH = (CONVERGE,) * 4


def inverse_root(z: Tensor) -> Tensor:
    """Z^-1/2 of symmetric positive matrices (B, r, r).

    Less exact where the square root of an eigenvalue is below 0.001 of their norm, or where they
    are near the rounding of the largest: `polish` follows.
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
