"""Which products of NGD may round their factors."""

import torch
from ngd_tools import random_gradients, random_start, run

from utils.optim.ngd.batched_fisher import Product
from utils.optim.ngd.optimizer import NGD
from utils.optim.ngd.stack import SHORT


def test_only_products_along_long_axes_are_fast(monkeypatch):
    """NGD takes fast products only where they pay, and leaves the process's setting alone."""
    seen, backend = set(), torch.backends.mkldnn.matmul
    before, plain = backend.fp32_precision, Product.take

    def take(product, *norms):
        seen.add((product.axis.multiplier.shape[-1], backend.fp32_precision))
        plain(product, *norms)

    monkeypatch.setattr(Product, "take", take)
    shapes = {"short": (SHORT, 3), "long": (SHORT + 1, 3)}
    run(random_start(shapes), random_gradients(shapes, 1), torch.float32, products="fast")
    assert seen == {(3, "ieee"), (SHORT, "ieee"), (SHORT + 1, "bf16")}
    assert backend.fp32_precision == before


def test_fast_products_keep_the_scatter_of_weak_directions():
    """Beside one of 10,000 times their scatter. The scatter of rounded gradients hardly differs;
    one that was rounded itself would."""
    generator, fisher = torch.Generator().manual_seed(0), {}
    gradient = torch.randn(64, 256, generator=generator)
    gradient += 100 * torch.ones(64, 1) / 8 * torch.randn(1, 256, generator=generator)
    for products in ("float32", "fast"):
        weight = torch.nn.Parameter(torch.zeros(64, 256))
        optimizer = NGD([weight], products=products, rank=63)
        for _ in range(12):
            weight.grad = gradient.clone()
            optimizer.step()
        basis, spectrum = (optimizer.state[weight][f"{name}_0"] for name in ("basis", "spectrum"))
        fisher[products] = basis.mT @ spectrum @ basis
    weak = torch.eye(64) - 1 / 64  # all directions but the strong one
    expected, ours = (weak @ fisher[products] @ weak for products in fisher)
    assert (ours - expected).norm() < 0.1 * expected.norm()
