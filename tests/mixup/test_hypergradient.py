"""The exact hypergradient against numerical differentiation, the fast one against the exact."""

import contextlib
import itertools

import pytest
import torch
from emulated_tf32 import EmulatedTF32, precision
from torch import nn
from torch.func import functional_call

from utils.mixup import meta as meta_mixup
from utils.mixup.hypergradient import (
    exact_hypergradient,
    exact_product,
    fast_hypergradient,
    fast_product,
    gradient_at,
)
from utils.mixup.meta import Pairs, VirtualStep
from utils.mixup.mixing import mix_pairs
from utils.models.resnet import ResNet
from utils.training.objective import mixed_cross_entropy

LR = 0.1


class Transformer(nn.Module):
    """(n, tokens, width) -> (n, classes)."""

    def __init__(self, width=16, classes=5, layers=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs):
        return self.head(self.encoder(inputs).mean(1))


def smooth_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)
    )


def piecewise_network():
    """With the functions that take branches besides ReLU, and have second derivatives."""
    kinds = (nn.MaxPool2d(3, 1, 1), nn.ReLU6(), nn.LeakyReLU(), nn.PReLU(4), nn.Hardtanh())
    layers = [
        layer
        for number, kind in enumerate((*kinds, *kinds))
        for layer in (nn.Conv2d(4 if number else 3, 4, 3, padding=1), nn.BatchNorm2d(4), kind)
    ]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 5))


CASES = {
    "smooth": (smooth_network, (3, 6, 6)),
    "resnet": (lambda: ResNet(18, 5, width=4, stem="cifar"), (3, 8, 8)),
    "transformer": (Transformer, (6, 16)),
}
# With so many kinks that a numerical difference is likely to cross one.
KINKED = {
    "max-pooling": (lambda: ResNet(18, 5, width=4, stem="imagenet"), (3, 32, 32)),
    "piecewise": (piecewise_network, (3, 8, 8)),
}
# Ill-conditioned: almost all of the gradient is in the first layers.
DEEP = {"resnet-50": (lambda: ResNet(50, 5, width=8, stem="cifar"), (3, 16, 16))}


def problem(case: str, dtype, n=16, trained=20):
    """Losses as functions of the weights, as in `VirtualStep`, of a slightly trained model."""
    make, shape = (CASES | KINKED | DEEP)[case]
    torch.manual_seed(0)
    model = make().to(dtype)
    own, other, clean = (torch.randn(n, *shape, dtype=dtype) for _ in range(3))
    targets, partners, clean_targets = (torch.randint(0, 5, (n,)) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(trained):
        nn.functional.cross_entropy(model(own), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def logits(weights, inputs):
        tensors = dict(zip(names, weights, strict=True))
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        return functional_call(model, tensors | copies, (inputs,))

    def mixed(weights, lam):
        inputs = mix_pairs(own, other, lam)
        return mixed_cross_entropy(logits(weights, inputs), targets, partners, lam, 0.1).mean()

    def clean_loss(weights):
        return nn.functional.cross_entropy(logits(weights, clean), clean_targets)

    return mixed, clean_loss, list(model.parameters()), torch.rand(n, dtype=dtype)


def cosine(one, other) -> float:
    return nn.functional.cosine_similarity(one, other, dim=0).item()


@pytest.mark.parametrize("case", CASES)
def test_exact_equals_numerical_differentiation(case):
    """Central differences of the clean loss after the virtual step, one lambda at a time."""
    mixed, clean, weights, lam = problem(case, torch.float64, n=6)

    def after(lam):
        at = [w.detach().requires_grad_() for w in weights]
        gradient = torch.autograd.grad(mixed(at, lam), at)
        with torch.no_grad():
            return clean([w - LR * g for w, g in zip(at, gradient, strict=True)]).item()

    # Small enough to cross no kink of a ReLU; without ReLUs larger, for less rounding.
    size = 1e-6 if case != "smooth" else 1e-4
    numerical = torch.empty_like(lam)
    for i in range(len(lam)):
        step = torch.zeros_like(lam)
        step[i] = size
        numerical[i] = (after(lam + step) - after(lam - step)) / (2 * size)
    exact = exact_hypergradient(mixed, clean, weights, lam, LR)
    assert exact.abs().max() > 1e-5
    assert (exact - numerical).norm() <= 1e-6 * max(1.0, numerical.norm().item())


@pytest.mark.parametrize("case", [*CASES, *KINKED])
def test_fast_equals_exact_in_float64(case):
    mixed, clean, weights, lam = problem(case, torch.float64)
    exact = exact_hypergradient(mixed, clean, weights, lam, LR)
    fast = fast_hypergradient(mixed, clean, weights, lam, LR)
    assert (fast - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("trained", [0, 20])
@pytest.mark.parametrize("case", [*CASES, *KINKED, *DEEP])
def test_fast_has_the_direction_of_exact_in_float32(case, trained):
    mixed, clean, weights, lam = problem(case, torch.float32, trained=trained)
    exact = exact_hypergradient(mixed, clean, weights, lam, LR)
    fast = fast_hypergradient(mixed, clean, weights, lam, LR)
    assert cosine(fast, exact) >= 0.99
    assert fast.dtype == torch.float32


@pytest.mark.parametrize("product", [exact_product, fast_product])
def test_the_gradient_of_the_batch_may_be_given(product):
    """The hypergradient is -lr times the product with v, the clean gradient after the step."""
    mixed, clean, weights, lam = problem("smooth", torch.float64)
    gradient = torch.autograd.grad(mixed(weights, lam), weights)

    def known(factor: float):
        stepped = [w - LR * factor * g for w, g in zip(weights, gradient, strict=True)]
        return -LR * product(mixed, weights, gradient_at(clean, stepped), lam)

    find = exact_hypergradient if product is exact_product else fast_hypergradient
    torch.testing.assert_close(known(1), find(mixed, clean, weights, lam, LR))
    assert (known(5) - known(1)).norm() > 1e-3 * known(1).norm()


@pytest.mark.parametrize("case", [*CASES, *KINKED])
def test_the_fast_product_equals_the_exact_one(case):
    mixed, clean, weights, lam = problem(case, torch.float64)
    v = gradient_at(clean, weights)
    exact, fast = (product(mixed, weights, v, lam) for product in (exact_product, fast_product))
    assert (fast - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("find", [exact_hypergradient, fast_hypergradient])
def test_weights_without_effect_on_the_loss(find):
    mixed, clean, weights, lam = problem("smooth", torch.float64)
    unused = torch.ones(3, dtype=torch.float64)
    result = find(
        lambda ws, lam: mixed(ws[:-1], lam), lambda ws: clean(ws[:-1]), [*weights, unused], lam, LR
    )
    rtol = 1e-12 if find is exact_hypergradient else 1e-4
    torch.testing.assert_close(result, find(mixed, clean, weights, lam, LR), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("find", [exact_hypergradient, fast_hypergradient])
def test_no_effect_is_zero(find):
    """Zero for a clean loss that does not depend on the weights, and for lr = 0."""
    mixed, clean, weights, lam = problem("smooth", torch.float64)
    flat = find(mixed, lambda ws: 0 * ws[0].sum(), weights, lam, LR)
    assert torch.equal(flat, torch.zeros_like(lam))
    assert torch.equal(find(mixed, clean, weights, lam, 0.0).abs(), torch.zeros_like(lam))


@pytest.mark.parametrize("find", [exact_hypergradient, fast_hypergradient])
def test_a_quadratic_in_closed_form(find):
    """L_mixed = |w - (lam a + (1 - lam) b)|^2 / 2, L_clean = |w - c|^2 / 2, mean over pairs."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 3, dtype=torch.float64)
    c, w = torch.randn(2, 3, dtype=torch.float64)
    lam = torch.rand(4, dtype=torch.float64)

    def mixed(ws, lam):
        return (ws[0] - mix_pairs(a, b, lam)).square().sum(1).mean() / 2

    result = find(mixed, lambda ws: (ws[0] - c).square().sum() / 2, [w], lam, LR)
    stepped = w - LR * (w - mix_pairs(a, b, lam).mean(0))
    torch.testing.assert_close(result, LR * (a - b) @ (stepped - c) / 4, rtol=1e-6, atol=1e-12)


# ---- where TF32 is allowed, the default for convolutions on a GPU ------------------------------

# `__wrapped__` is the function without its `float32_products` decorator.
EXACT_AND_FAST = pytest.mark.parametrize(
    ("exact", "fast"),
    [(exact_hypergradient, fast_hypergradient), (exact_product, fast_product)],
    ids=["hypergradient", "product"],
)


def arguments(form, case: str, trained=20) -> tuple:
    mixed, clean, weights, lam = problem(case, torch.float32, trained=trained)
    if form is exact_hypergradient:
        return mixed, clean, weights, lam, LR
    return mixed, weights, gradient_at(clean, weights), lam


@EXACT_AND_FAST
@pytest.mark.parametrize("trained", [0, 20])
@pytest.mark.parametrize("case", ["resnet", "transformer"])
def test_tf32_does_not_round(case, trained, exact, fast):
    """Without the decorator the fast form is mostly noise, which may be near to what is wanted."""
    given = arguments(exact, case, trained)
    wanted = exact(*given)
    # A transformer has matrix products only; for these TF32 is on only if a user asks for it.
    products = [torch.backends.cuda.matmul] if case == "transformer" else []
    with precision("tf32", *products), EmulatedTF32() as emulated:
        assert cosine(exact(*given), wanted) > 0.99
        assert cosine(fast(*given), wanted) > 0.99
        assert emulated.used == 0
        assert cosine(fast.__wrapped__(*given), wanted) < 0.95
        assert emulated.used > 0


def test_tf32_does_not_round_the_hypergradient_of_each_pair(monkeypatch):
    torch.manual_seed(0)
    model = ResNet(18, 5, width=4, stem="cifar")
    own, other, clean = torch.randn(3, 16, 3, 8, 8)
    targets, partners, clean_targets = torch.randint(0, 5, (3, 16))
    pairs = Pairs(own, other, targets, partners, torch.rand(16))

    def hypergradient(exact=False):
        virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
        return virtual.batch_hypergradient(pairs, pairs.lam, (clean, clean_targets), LR)

    wanted = hypergradient(exact=True)
    with EmulatedTF32():
        assert cosine(hypergradient(), wanted) > 0.99
        monkeypatch.setattr(meta_mixup, "fast_hypergradient", fast_hypergradient.__wrapped__)
        assert cosine(hypergradient(), wanted) < 0.95


@EXACT_AND_FAST
@pytest.mark.parametrize("case", CASES)
def test_without_tf32_the_decorator_changes_no_bit(case, exact, fast):
    given = arguments(exact, case)
    for form in (exact, fast):
        assert torch.equal(form(*given), form.__wrapped__(*given))


@EXACT_AND_FAST
@pytest.mark.parametrize("own", ["none", "tf32", "ieee"])
def test_precision_settings_are_restored(own, exact, fast):
    """Even if a loss raises."""
    backends = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    given, seen = arguments(exact, "smooth"), []

    def mixed(weights, lam):
        seen.extend(backend.fp32_precision for backend in backends)
        if broken:
            raise ZeroDivisionError
        return given[0](weights, lam)

    with precision(own, *backends):
        before = [backend.fp32_precision for backend in backends]
        for form, broken in itertools.product((exact, fast), (False, True)):
            with pytest.raises(ZeroDivisionError) if broken else contextlib.nullcontext():
                form(mixed, *given[1:])
            assert [backend.fp32_precision for backend in backends] == before
    assert seen == ["ieee"] * len(seen) and len(seen) == 10  # fast calls `mixed` twice
