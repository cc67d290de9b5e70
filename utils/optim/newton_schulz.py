"""Newton-Schulz iterations, which bring all singular values of a matrix X near to 1: Jordan et al.,
"Muon: an optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/.

    A = X X^T,   X <- a X + (b A + c A A) X

The coefficients are those of modded-nanogpt and timm, other ones for each of the five iterations:
https://leloykun.github.io/ponder/muon-opt-coeffs/.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalize_(stacks: list[Tensor]) -> None:
    """Replaces each matrix by one with the same singular vectors, and singular values of about 1.

    Products of the size of A are made for all matrices with equally many rows at once.

    Args:
        stacks: (matrices, rows, columns) each, with no more rows than columns, and singular values
            of at most 1.
    """
    by_rows: dict[int, list[int]] = {}
    for index, x in enumerate(stacks):
        by_rows.setdefault(x.shape[1], []).append(index)
    squares, polynomials, parts = [], [], {}
    for rows, members in by_rows.items():
        counts = [len(stacks[index]) for index in members]
        square = stacks[0].new_empty(sum(counts), rows, rows)
        polynomial = torch.empty_like(square)
        squares.append(square)
        polynomials.append(polynomial)
        pairs = zip(square.split(counts), polynomial.split(counts), strict=True)
        parts.update(zip(members, pairs, strict=True))
    for a, b, c in COEFFICIENTS:
        for index, x in enumerate(stacks):
            torch.bmm(x, x.mT, out=parts[index][0])
        for square, polynomial in zip(squares, polynomials, strict=True):
            torch.baddbmm(square, square, square, beta=b, alpha=c, out=polynomial)
        for index, x in enumerate(stacks):
            stacks[index] = torch.baddbmm(x, parts[index][1], x, beta=a)
