"""The network of the public speed records on CIFAR-10.

Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), arXiv:2404.00498; its descent from
hlb-CIFAR10 is told there. Here the whitened stem has no bias, and a learning rate of its own for
the head (`--head_lr`) replaces the factor of the logits, which is the same with Adam.
"""

import torch
from torch import Tensor, nn

from .whiten import WhitenedStem

LEAST = 9  # pixels: 8 behind the stem, which three groups halve


class Group(nn.Module):
    """3x3, pooling by 2, BatchNorm, GELU; 3x3, BatchNorm, GELU;
    (n, inputs, h, w) -> (n, outputs, h / 2, w / 2)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs), _norm(outputs)
        self.pool = nn.MaxPool2d(2)
        self.conv2, self.norm2 = _conv(outputs, outputs), _norm(outputs)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu(self.norm1(self.pool(self.conv1(x))))
        return self.gelu(self.norm2(self.conv2(x)))


class AirbenchNet(nn.Module):
    """(n, channels, height, width) -> logits (n, classes); height and width are LEAST or more.

    Args:
        classes: number of logits.
        width: channels of the first group; the other two have four times as many. 64 in the paper.
        channels: of the pictures.
    """

    HEAD = "fc"
    BLOCKS = ("groups",)

    def __init__(self, classes: int = 10, width: int = 64, channels: int = 3):
        super().__init__()
        self.stem = WhitenedStem(channels)
        self.groups = nn.Sequential(
            Group(self.stem.outputs, width), Group(width, 4 * width), Group(4 * width, 4 * width)
        )
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(4 * width, classes, bias=False)
        nn.init.normal_(self.fc.weight, std=1 / (4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.groups(self.stem(x))), 1))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    """Whose first channels pass on the input, when training begins."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight[: min(inputs, outputs)].data)
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    """Without a scale that trains; its statistics follow the weights of a short run."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
