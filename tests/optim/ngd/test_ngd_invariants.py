"""Natural gradient: properties by the theory, and the update of many tensors at once."""

import numpy as np
import pytest
import torch
from ngd_tools import (
    DTYPES,
    SHAPES,
    SMALL,
    WITHOUT_LONG_AXIS,
    assert_equal_to_the_bit,
    assert_near,
    each_dtype,
    each_natural_form,
    random_gradients,
    random_start,
    run,
)

from utils.optim.ngd import fisher
from utils.optim.ngd.batched_fisher import (
    AxisBatch,
    Product,
    norms,
    renew_multipliers_,
    update_,
)
from utils.optim.ngd.optimizer import NGD

# ---- properties by the theory -------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": True},
        {"dampening": 0.4},
        {"weight_decay": 0.1},
        {"power": 0.5},
        {"momentum_first": True, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=["plain", "nesterov", "dampening", "weight_decay", "root", "momentum_first"],
)
def test_large_alpha_is_sgd(momentum, settings):
    if settings.get("nesterov") and not momentum:
        settings = {"weight_decay": 0.01}
    settings = {"lr": 0.05, "momentum": momentum, "nesterov": False} | settings
    shapes = WITHOUT_LONG_AXIS
    start, gradients = random_start(shapes), random_gradients(shapes, 20)
    of_sgd = {k: v for k, v in settings.items() if k not in ("power", "momentum_first")}
    expected, _ = run(start, gradients, optimizer=torch.optim.SGD, **of_sgd)
    ours, _ = run(start, gradients, alpha=1e12, **settings)
    assert_near(ours, expected, 1e-6)


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_with_momentum_first_every_step_has_the_fixed_length(power):
    """0.2 lr is its root mean square, however far momentum adds up or cancels gradients."""
    start, gradients = random_start(SMALL), random_gradients(SMALL, 20)
    settings = {"norm": "fixed", "momentum_first": True, "power": power, "alpha": 0.01}
    ours, _ = run(start, gradients, lr=0.5, **settings)
    for before, after in zip([start, *ours], ours, strict=False):
        for name, value in after.items():
            assert np.sqrt(np.mean((value - before[name]) ** 2)) == pytest.approx(0.1, rel=1e-6)


def test_the_root_is_that_of_a_dense_matrix():
    """I - R'V is G^-1/2 up to a factor, at the damping that its small alpha leaves; in float32."""
    generator = torch.Generator().manual_seed(0)
    for length, rank in ((20, 5), (20, 12), (300, 80)):
        draw = correlated(30, length, generator, tensors=1, dtype=torch.float32)
        axis = batch_of(draw(), alpha=0.01, rank=rank, power=0.5)
        for _ in range(30):
            natural(draw(), axis)
        f = full(axis)[0].double()
        values, vectors = torch.linalg.eigh(f + 0.01 * f.trace() / length * torch.eye(length))
        x = torch.randn(7, length, generator=generator)
        expected = x.double() @ vectors @ torch.diag(values**-0.5) @ vectors.T
        product = Product(x[None].clone(), axis, torch.empty(1, 7, length))
        product.take()
        ours = product.result[0].double()
        cosine = (ours * expected).sum() / (ours.norm() * expected.norm())
        assert cosine > 1 - 1e-5, (length, rank)


@each_dtype
def test_the_norm_of_each_gradient_is_kept(dtype):
    start, gradients = random_start(SHAPES), random_gradients(SHAPES, 15)
    settings = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "alpha": 0.1}
    ours, _ = run(start, gradients, dtype, **settings)
    turned = 0
    for index, step in enumerate(gradients):
        before = ours[index - 1] if index else start
        for name, gradient in step.items():
            natural = before[name] - ours[index][name]
            assert np.linalg.norm(natural) == pytest.approx(
                np.linalg.norm(gradient), rel=20 * DTYPES[dtype]
            )
            turned += np.abs(natural - gradient).max() > 0.1
    assert turned > 50  # most have another direction


def batch_of(
    gradients: torch.Tensor, alpha=4.0, eta=0.1, rank=None, basis=None, power=1.0
) -> AxisBatch:
    """F of the last axis of gradients (B, ..., D), before the first update."""
    tensors, length = gradients.shape[0], gradients.shape[-1]
    rank = rank or fisher.default_rank(length)
    new = fisher.zero_fisher(rank, length, dtype=gradients.dtype)
    new |= {} if basis is None else {"basis": basis}
    stacked = {name: torch.stack([value] * tensors) for name, value in new.items()}
    axis = AxisBatch(gradients.ndim - 1, alpha, eta, **stacked, power=power)
    renew_multipliers_([axis])
    return axis


def natural(gradients: torch.Tensor, axis: AxisBatch, learn=True) -> torch.Tensor:
    """Gradients (B, ..., D) preconditioned along the last axis and scaled; `axis` is updated."""
    x, norm = gradients.clone(), norms(gradients)
    product = Product(x, axis, torch.empty_like(x))
    product.take(norm if learn else None)
    x = product.result
    x = x * (norm / norms(x)).view(-1, *[1] * (x.ndim - 1))
    if learn:
        update_([axis], None)
    return x


def full(axis: AxisBatch) -> torch.Tensor:
    """F, (B, D, D)"""
    projection = axis.basis.mT @ axis.basis
    rest = torch.eye(projection.shape[-1], dtype=projection.dtype) - projection
    return axis.basis.mT @ axis.spectrum @ axis.basis + axis.rest[:, None, None] * rest


def correlated(rows: int, length: int, generator, tensors=2, dtype=torch.float64):
    """A function that draws gradients (tensors, rows, length) of a fixed steep covariance."""
    mixer = torch.randn(tensors, length, length, generator=generator, dtype=dtype)
    mixer = mixer * torch.logspace(0, -2, length, dtype=dtype)[:, None]

    def draw():
        return torch.randn(tensors, rows, length, generator=generator, dtype=dtype) @ mixer

    return draw


@pytest.mark.parametrize("rank", [5, 12], ids=["V", "I_minus_RV"])
def test_the_basis_stays_orthonormal_in_float32(rank):
    """And with it the paper's W W' = E is diagonal.

    In the paper W = E^1/2 R with R in the eigenbasis of F and E = diag(1 / (beta / d + 1)), d being
    the eigenvalues above rho; and the gradient is multiplied by I - W'W, which is what is kept.
    """
    generator = torch.Generator().manual_seed(0)
    draw = correlated(30, 20, generator, dtype=torch.float32)
    axis = batch_of(draw(), rank=rank)
    for _ in range(200):
        natural(draw(), axis)
    eye = torch.eye(rank)
    assert (axis.basis @ axis.basis.mT - eye).abs().max() < 1e-5
    assert torch.equal(axis.spectrum, axis.spectrum.mT)
    eigenvalues, rotation = torch.linalg.eigh(axis.spectrum)
    r = rotation.mT @ axis.basis
    d = eigenvalues - axis.rest[:, None]
    assert (d[:, -3:] > 0).all()
    trace = eigenvalues.sum(1) + (20 - rank) * axis.rest
    beta = axis.rest + axis.alpha / 20 * trace
    e = d / (d + beta[:, None])
    signed = r * e.abs().sqrt()[:, :, None]
    product = signed @ signed.mT  # W W', up to signs of E
    assert (product - torch.diag_embed(e.abs())).abs().max() < 1e-5
    inverse = r.mT @ (e[:, :, None] * r)  # W'W
    if axis.whole:
        expected, found = torch.eye(20) - inverse, axis.multiplier
    else:
        assert axis.multiplier.shape == (2, rank, 20)
        expected, found = inverse, axis.basis.mT @ axis.multiplier
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@each_natural_form
@pytest.mark.parametrize("axis", [0, 1])
def test_a_rotation_of_gradients_and_basis_rotates_the_result(axis, form):
    """With gradients Q g along an axis and R Q' at the start, all weights are Q w."""
    rng = np.random.default_rng(3)
    start, gradients = random_start({"w": (9, 11)}), random_gradients({"w": (9, 11)}, 25)
    length = start["w"].shape[axis]
    q = np.linalg.qr(rng.standard_normal((length, length)))[0]

    def rotated(array):
        return np.moveaxis(np.moveaxis(array, axis, -1) @ q.T, -1, axis)

    plain, _ = run(start, gradients, weight_decay=0.1, **form)
    weight = torch.tensor(rotated(start["w"])).requires_grad_()
    optimizer = NGD([weight], weight_decay=0.1, **form)
    first = fisher.first_basis(fisher.default_rank(length), length, dtype=torch.float64)
    optimizer.state[weight][f"basis_{axis}"] = first @ torch.tensor(q).T
    for step, expected in zip(gradients, plain, strict=True):
        weight.grad = torch.tensor(rotated(step["w"]))
        optimizer.step()
        np.testing.assert_allclose(weight.detach(), rotated(expected["w"]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 3.0, 1e6])
def test_the_scale_of_gradients_changes_no_direction(scale):
    start, gradients = random_start(SMALL), random_gradients(SMALL, 20)
    start = {name: 0 * value for name, value in start.items()}
    scaled = [{name: scale * value for name, value in step.items()} for step in gradients]
    plain, _ = run(start, gradients)
    ours, _ = run(start, scaled)
    ours = [{name: value / scale for name, value in step.items()} for step in ours]
    assert_near(ours, plain, 1e-8)


def test_a_known_covariance_is_learned_and_whitened():
    """F goes to the covariance C, and the covariance of natural gradients to that of X G^-1.

    With C = sum_i lambda_i v_i v_i' and F = C, along v_i X is multiplied by the inverse of lambda_i
    + alpha tr(F) / D and by a common factor; so C goes to the matrix of the same eigenvectors with
    eigenvalues that are a common factor times lambda / (lambda + alpha tr(F) / D)^2.
    """
    generator, (rows, length, rank) = torch.Generator().manual_seed(1), (4000, 12, 4)
    v = torch.linalg.qr(torch.randn(length, length, generator=generator, dtype=torch.float64)).Q
    eigenvalues = torch.ones(length, dtype=torch.float64)
    eigenvalues[:3] = torch.tensor([40.0, 20.0, 5.0])
    covariance = v @ torch.diag(eigenvalues) @ v.T
    root = torch.diag(eigenvalues.sqrt()) @ v.T

    def draw():
        return (torch.randn(rows, length, generator=generator, dtype=torch.float64) @ root)[None]

    alpha = 0.5
    axis = batch_of(draw(), alpha=alpha, rank=rank)
    for _ in range(60):
        natural(draw(), axis)
    learned = full(axis)[0]
    expected = covariance / covariance.trace()
    assert (learned / learned.trace() - expected).norm() < 0.02 * expected.norm()
    x = torch.cat([natural(draw(), axis, learn=False)[0] for _ in range(10)])
    along = v.T @ (x.T @ x / len(x)) @ v
    predicted = eigenvalues / (eigenvalues + alpha * eigenvalues.mean()) ** 2
    predicted = predicted / predicted.sum()
    along = along / along.trace()
    assert (along.diagonal() / predicted - 1).abs().max() < 0.05
    off_diagonal = along - torch.diag(along.diagonal())
    assert off_diagonal.abs().max() < 0.02 * predicted.max()
    # Whiter: the eigenvalue furthest from their mean, by the predicted ratio.
    assert predicted.max() / predicted.min() < 10 < (eigenvalues.max() / eigenvalues.min())


def test_the_trace_of_f_is_the_running_mean_of_squared_norms():
    """tr F = tr T: the low rank loses no part of a gradient, except that of delta."""
    generator = torch.Generator().manual_seed(2)
    draw = correlated(15, 10, generator)
    axis, mean = batch_of(draw(), eta=0.2), torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        x = draw()
        natural(x, axis)
        mean = 0.8 * mean + 0.2 * norms(x).square() / 15
        trace = full(axis).diagonal(dim1=1, dim2=2).sum(1)
        assert ((trace / mean - 1) > 0).all() and ((trace / mean - 1) < 0.01).all()


# ---- the update ---------------------------------------------------------------------------------


def noted_axes() -> list[AxisBatch]:
    """Two axes that have noted a gradient, for `update_`."""
    generator, made = torch.Generator().manual_seed(0), []
    for length, rank in ((6, 3), (9, 2)):
        x = torch.randn(2, 8, length, generator=generator)
        new = fisher.zero_fisher(rank, length)
        stacked = {name: torch.stack([value] * 2) for name, value in new.items()}
        axis = AxisBatch(2, 4.0, 0.1, **stacked)
        renew_multipliers_([axis])
        Product(x, axis, torch.empty_like(x)).take(norms(x))
        made.append(axis)
    return made


def of_axis(axis: AxisBatch) -> list[torch.Tensor]:
    return [axis.basis.clone(), axis.spectrum.clone(), axis.rest.clone(), axis.multiplier.clone()]


def test_an_update_is_skipped_by_selection():
    """As on a GPU, without the host."""
    flagged, taken, plain = noted_axes(), noted_axes(), noted_axes()
    update_(flagged, torch.tensor(True))
    update_(taken, torch.tensor(False))
    update_(plain, None)
    for one, other, third, before in zip(flagged, taken, plain, noted_axes(), strict=True):
        assert_equal_to_the_bit(of_axis(one), of_axis(before))
        assert_equal_to_the_bit(of_axis(other), of_axis(third))
        assert not torch.equal(other.multiplier, before.multiplier)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_update_can_be_compiled():
    """As one graph, with the same result: nothing in it needs a value on the host."""
    plain, traced = noted_axes(), noted_axes()
    update_(plain, torch.tensor(False))
    torch._dynamo.reset()
    torch.compile(update_, fullgraph=True, backend="eager")(traced, torch.tensor(False))
    for one, other in zip(traced, plain, strict=True):
        torch.testing.assert_close(of_axis(one), of_axis(other))
        assert other.rest.all()
