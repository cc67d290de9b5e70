"""Which products of NGD may round their factors."""

import torch
from ngd_tools import random_gradients, random_start, run

from utils.optim.ngd.batched_fisher import Product
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
