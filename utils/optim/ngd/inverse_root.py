"""Z^-1/2 for a batch of symmetric positive definite matrices, by matrix products alone.

The number of products is fixed, so there is no host sync.
"""

import torch
from torch import Tensor

# Coefficients of odd polynomials a x + b x^3 + c x^5 that drive a matrix's singular values to 1
# when applied in turn. POLAR_EXPRESS is the optimal sequence of six for singular values from 0.001
# to 1 (Amsel et al., "The Polar Express" (2025), arXiv:2505.16932); NEWTON_SCHULZ, of fifth order,
# converges when iterated (Higham, "Functions of matrices", 2008, ch. 8).
POLAR_EXPRESS = (
    (8.287212018, -23.595886519, 17.300387313),
    (4.107059112, -2.947849917, 0.544843108),
    (3.948690853, -2.908902116, 0.551819139),
    (3.318419657, -2.488488024, 0.510048940),
    (2.300652020, -1.668903985, 0.418807312),
    (1.891301408, -1.267995827, 0.376804089),
)
NEWTON_SCHULZ = (15 / 8, -10 / 8, 3 / 8)
ROOT_POLYNOMIALS = (*POLAR_EXPRESS, NEWTON_SCHULZ)
POLISH_POLYNOMIALS = (NEWTON_SCHULZ,) * 4


def inverse_root(z: Tensor) -> Tensor:
    """Z^-1/2 of symmetric positive definite matrices (B, r, r).

    Inaccurate for eigenvalues whose square root is below 0.001 of the norm, or that are close to
    the rounding error of the largest one; `polish` corrects these.
    """
    size = torch.linalg.matrix_norm(z)[:, None, None]
    z = z / size
    # Rounding must not make the smallest eigenvalues negative.
    add_to_diagonal_(z, 16 * torch.finfo(z.dtype).eps)
    return to_polar_factor(z, ROOT_POLYNOMIALS) * size.rsqrt()


def to_polar_factor(z: Tensor, polynomials) -> Tensor:
    """P with P Y = the polar factor of Y, from Z = YY' (B, r, r) with eigenvalues up to about 1.

    Each polynomial is p(Y) = (a I + b YY' + c (YY')^2) Y. P is the product of the brackets, which
    depend on Z alone, and commute, being polynomials in Z.
    """
    root = None
    for number, (a, b, c) in enumerate(polynomials):
        bracket = torch.baddbmm(z, z, z, beta=b, alpha=c)
        add_to_diagonal_(bracket, a)
        root = bracket if root is None else torch.bmm(bracket, root)
        if number + 1 < len(polynomials):
            z = torch.bmm(torch.bmm(bracket, z), bracket)
    return root


def add_to_diagonal_(matrices: Tensor, value: float | Tensor) -> None:
    """Adds value I to each of (B, r, r). `value`: one for all, or (B, 1)."""
    matrices.diagonal(dim1=1, dim2=2).add_(value)


def polish(z: Tensor) -> Tensor:
    """Z^-1/2 for Z near I: Z = B B', where B is the basis that `inverse_root` gives.

    In float32 the squares of the smallest directions that DELTA allows are as small as the rounding
    errors of the largest. `inverse_root` gives these directions a length of about 0.6, and `polish`
    makes it 1.
    """
    return to_polar_factor(z, POLISH_POLYNOMIALS)


def polished_root(z: Tensor) -> Tensor:
    """Z^-1/2 of symmetric positive definite matrices (B, r, r), to rounding error."""
    root = inverse_root(z)
    return torch.bmm(polish(torch.bmm(torch.bmm(root, z), root)), root)
