"""The inverse root in matrix products against eigenvectors."""

import math

import pytest
import torch
from ngd_tools import each_dtype

from utils.optim.ngd.inverse_root import inverse_root, polished_root


def symmetric(eigenvalues: torch.Tensor, seed=0) -> torch.Tensor:
    """(B, r, r) matrices with these eigenvalues (r,), in random bases."""
    generator, rank = torch.Generator().manual_seed(seed), len(eigenvalues)
    q = torch.linalg.qr(torch.randn(3, rank, rank, generator=generator, dtype=torch.float64)).Q
    return q @ torch.diag(eigenvalues) @ q.mT


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rank", [1, 2, 40])
def test_it_equals_that_by_eigenvectors(rank, scale):
    """By itself to a thousandth, from which `polish` reaches rounding error."""
    for condition in (10, 1e2, 1e3, 1e4, 1e5, 1e6):
        z = scale * symmetric(torch.logspace(0, -math.log10(condition), rank).double())
        eigenvalues, vectors = torch.linalg.eigh(z)
        expected = vectors @ torch.diag_embed(eigenvalues**-0.5) @ vectors.mT
        found = inverse_root(z)
        for each, tolerance in ((found, 2e-3), (polished_root(z), 1e-9)):
            difference = torch.linalg.matrix_norm(each - expected, 2)
            relative = difference / torch.linalg.matrix_norm(expected, 2)
            assert relative.max() < tolerance, condition


@each_dtype
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_inverse_root_of_a_singular_matrix_is_finite(rank, dtype):
    eigenvalues = torch.zeros(8, dtype=torch.float64)
    eigenvalues[:rank] = 1.0
    found = inverse_root(symmetric(eigenvalues).to(dtype))
    if rank:  # zeros have none: the caller skips such a matrix
        assert found.isfinite().all()
