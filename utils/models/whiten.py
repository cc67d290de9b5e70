"""A first layer that whitens patches of the picture, without anything to train.

Page, "ResNet: train to 94 % CIFAR-10 accuracy in 100 seconds" (2019), part 8; with the negated
filters, Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), arXiv:2404.00498.
"""

import torch
from torch import Tensor, nn

SIDE = 2  # of a patch
EPSILON = 5e-4  # is added to the variances, so that noise is not enlarged


class WhitenedStem(nn.Module):
    """(n, channels, h, w) -> (n, 2 SIDE^2 channels, h - 1, w - 1).

    Its filters are the principal axes of patches, each divided by its standard deviation, and their
    negations; GELU follows. As they are computed from pictures (`fit`) and never trained, no
    gradient reaches this layer, whose backward pass would be the most expensive one of a small
    network.
    """

    def __init__(self, channels: int):
        super().__init__()
        patch = channels * SIDE**2
        self.outputs = 2 * patch
        self.register_buffer("weight", torch.zeros(self.outputs, channels, SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(nn.functional.conv2d(x, self.weight))

    @torch.no_grad()
    def fit(self, pictures: Tensor) -> None:
        """Takes the filters from normalised pictures (n, channels, h, w); the same ones for the
        same pictures."""
        covariance, places = 0, 0
        for some in pictures.split(256):
            patches = nn.functional.unfold(some, SIDE).double()  # (n, patch, places)
            covariance = covariance + torch.einsum("npk,nqk->pq", patches, patches)
            places += len(patches) * patches.shape[2]
        variances, axes = torch.linalg.eigh(covariance / places)  # axes in columns
        filters = (axes / (variances + EPSILON).sqrt()).T
        self.weight.copy_(torch.cat([filters, -filters]).view(self.weight.shape))
