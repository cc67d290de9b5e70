"""Views of pictures over which the predicted probabilities are averaged (`--eval_views`).

The picture, itself moved by a pixel up and to the left, and down and to the right, and the mirror
images of all these: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), arXiv
2404.00498, section 3.5, and its repository cifar10-airbench, which averages logits instead.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PASSES = {"none": 1, "mirror": 2, "shift": 3, "both": 6}  # forward passes over a picture


def views_of(inputs: Tensor, views: str) -> list[tuple[float, Tensor]]:
    """[(weight, view)], the inputs themselves first. Untranslated views have half of the weight.

    Args:
        inputs: (n, channels, height, width).
        views: a key of PASSES.
    """
    found = [(1.0, inputs)]
    if views in ("shift", "both"):
        around = F.pad(inputs, (1, 1, 1, 1), mode="reflect")
        moved = around[..., 2:, 2:], around[..., :-2, :-2]
        # In the memory order of the inputs.
        found = [(0.5, inputs), *((0.25, torch.empty_like(inputs).copy_(one)) for one in moved)]
    if views in ("mirror", "both"):
        found = [(w / 2, each) for w, view in found for each in (view, view.flip(-1))]
    return found


def mean_log_probabilities(
    model: Callable[[Tensor], Tensor], inputs: Tensor, logits: Tensor, views: str
) -> Tensor:
    """log sum_v w_v softmax(model(v)) over the views v of the inputs: (n, classes) float32.
    `logits`: those of the inputs themselves."""
    (own, _), *others = views_of(inputs, views)
    weighted = [(own, logits), *((weight, model(view)) for weight, view in others)]
    return torch.stack([z.float().log_softmax(1) + math.log(w) for w, z in weighted]).logsumexp(0)
