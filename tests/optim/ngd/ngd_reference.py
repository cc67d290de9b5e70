"""Natural-gradient descent in plain float64 NumPy, one tensor and one axis at a time.

Written from the equations at the head of `utils/optim/ngd/fisher.py`, not from its code: here F
and G are whole D x D matrices, built and inverted directly. Slow, and easy to check.
"""

import math
from dataclasses import dataclass

import numpy as np

from utils.optim.muon_steps import COEFFICIENTS
from utils.optim.ngd.fisher import DELTA

EARLY_UPDATES = 10  # steps that all update F, whatever `update_period`


@dataclass
class Axis:
    """F = R' Lambda R + rho (I - R'R) of one axis. r: R (r, D). lam: Lambda (r, r)."""

    r: np.ndarray
    lam: np.ndarray
    rho: float

    @property
    def fisher(self) -> np.ndarray:
        """F, (D, D)"""
        rest = np.eye(self.r.shape[1]) - self.r.T @ self.r
        return self.r.T @ self.lam @ self.r + self.rho * rest

    def precondition(self, x: np.ndarray, alpha: float, power: float) -> np.ndarray:
        """X_hat = X G^-p |X| / |X G^-p|, where G = F + (alpha / D) tr(F) I."""
        f, length = self.fisher, self.r.shape[1]
        if not f.any() or not x.any():
            return x
        g = f + alpha / length * np.trace(f) * np.eye(length)
        values, vectors = np.linalg.eigh(g)
        turned = x @ (vectors @ np.diag(values**-power) @ vectors.T)
        return turned * (np.linalg.norm(x) / np.linalg.norm(turned))

    def update(self, x: np.ndarray, eta: float) -> None:
        """One step of subspace iteration on T = eta (S + delta s I) + (1 - eta) F."""
        (rank, length), s = self.r.shape, x.T @ x / len(x)
        floor = DELTA * np.linalg.norm(self.r @ s)
        t = eta * (s + floor * np.eye(length)) + (1 - eta) * self.fisher
        y = self.r @ t
        if not y.any():
            return
        c, u = np.linalg.eigh(y @ y.T)
        self.r = np.diag(c**-0.5) @ u.T @ y
        self.lam = np.diag(c**0.5)
        self.rho = (np.trace(t) - np.trace(self.lam)) / (length - rank)


def first_axis(length: int, rank: int | None) -> Axis:
    """F = 0; row i of R has a 1.1 at i and ones at i + r, i + 2 r, ..., and is of length 1."""
    rank = min((length + 1) // 2, 80) if rank is None else rank
    rank = min(rank, length - 1)
    r = np.zeros((rank, length))
    for i in range(rank):
        r[i, i::rank] = 1.0
        r[i, i] = 1.1
    r /= np.linalg.norm(r, axis=1, keepdims=True)
    return Axis(r, np.zeros((rank, rank)), 0.0)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether Muon steps a weight of this shape as a matrix; a kernel as (out, all the rest)."""
    sides = shape[0], math.prod(shape[1:])
    return 1 not in shape[:2] and min(sides) >= 4 and max(sides) <= 128 * min(sides)


def orthogonalized(x: np.ndarray) -> np.ndarray:
    """Odd polynomials of the singular values of X / |X|: a s + b s^3 + c s^5, one after another."""
    u, s, v = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ v


class Weight:
    """One tensor with its momentum, and its axes longer than 1, if there are at least two. With
    axes "kernel" all positions of a kernel (rows, columns) are one of them; with "patch" so are the
    positions and the input channels, in this order."""

    def __init__(self, start: np.ndarray, rank: int | None, axes: str):
        self.value, self.momentum, self.steps = start.astype(np.float64), None, 0
        self.which = axes
        shape = self.with_axes(start).shape
        long = [k for k, length in enumerate(shape) if length > 1]
        chosen = [k for k in long if k < 2] if axes == "channels" else long
        self.axes = {k: first_axis(shape[k], rank) for k in chosen if len(long) > 1}

    def step(
        self, g, *, lr=0.1, momentum=0.9, nesterov=True, dampening=0.0, weight_decay=0.0,
        decoupled=False, alpha=4.0, update_period=4, eta=0.1, norm="gradient", power=1.0,
        momentum_first=False, orthogonal=False,
    ):  # fmt: skip
        """Each axis sees the gradient as the axes before it leave it, with the first F still."""
        if decoupled:
            self.value = self.value * (1 - lr * weight_decay)
        else:
            g = g + weight_decay * self.value
        if momentum_first:
            g = self.with_momentum(g, momentum, nesterov, dampening)
        g = self.with_axes(g)
        for k, axis in self.axes.items():
            turned = np.moveaxis(g, k, -1)
            x = turned.reshape(-1, g.shape[k])  # (N, D)
            x_hat = axis.precondition(x, alpha, power)
            if self.steps < EARLY_UPDATES or self.steps % update_period == 0:
                axis.update(x, eta)
            g = np.moveaxis(x_hat.reshape(turned.shape), -1, k)
        is_orthogonal = orthogonal and self.axes and is_matrix(self.value.shape)
        if is_orthogonal and g.ndim == 2 and g.any():
            g = orthogonalized(g)
        g = self.without_axes(g)
        if norm == "fixed" and g.any():
            g = g * (0.2 * np.sqrt(g.size) / np.linalg.norm(g))
        if not momentum_first:
            g = self.with_momentum(g, momentum, nesterov, dampening)
        self.value = self.value - lr * g
        self.steps += 1

    def with_axes(self, g) -> np.ndarray:
        if self.which == "kernel" and g.ndim > 3:
            return g.reshape(*g.shape[:2], -1)
        if self.which == "patch" and g.ndim > 2:
            return np.moveaxis(g, 1, -1).reshape(len(g), -1)
        return g

    def without_axes(self, g) -> np.ndarray:
        shape = self.value.shape
        if self.which == "patch" and len(shape) > 2:
            return np.moveaxis(g.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
        return g.reshape(shape)

    def with_momentum(self, g, momentum, nesterov, dampening) -> np.ndarray:
        if self.momentum is None:
            self.momentum = g
        else:
            self.momentum = momentum * self.momentum + (1 - dampening) * g
        return g + momentum * self.momentum if nesterov else self.momentum


def trajectory(start: dict, gradients: list[dict], rank=None, axes="all", **settings) -> list[dict]:
    """The weights after every step, from arrays and the gradients of each step, by name.

    A name that is missing from a step's gradients is a weight without gradient in that step.
    """
    weights = {name: Weight(value, rank, axes) for name, value in start.items()}
    after = []
    for step in gradients:
        for name, gradient in step.items():
            weights[name].step(gradient.astype(np.float64), **settings)
        after.append({name: weight.value for name, weight in weights.items()})
    return after
