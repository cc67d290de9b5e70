"""ResNet, with torchvision's names, so that weights move freely between there and here.

He et al., "Deep residual learning for image recognition" (2016). The 3x3 convolution of a
bottleneck carries the stride, as in torchvision ("ResNet v1.5"). The CIFAR stem (3x3, stride 1, no
pooling) keeps 32x32 pictures from shrinking to one pixel.
"""

import re
from collections import Counter

import torch
from torch import Tensor, nn

from ..fused import is_fused
from ..fused.convolution import Chain, fused_block
from .whiten import WhitenedStem

# depth -> blocks in each of the four stages
STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STEMS = ("cifar", "imagenet", "whiten")


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    narrow = stride > 1 and inputs < 16
    kind = SlicedConv1x1 if narrow else nn.Conv2d
    return kind(inputs, outputs, 1, stride=stride, bias=False)


class SlicedConv1x1(nn.Conv2d):
    """A strided 1x1 convolution that drops the unused pixels first: the same numbers.

    On CPUs oneDNN's gradient of the weight writes past its buffer when a strided 1x1 convolution
    has fewer input channels than a vector register (16) and channels come last: wrong results or
    a crash (https://github.com/uxlfoundation/oneDNN/issues/6035). This way never gets there.
    """

    drops_first = True  # tells what is fused

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride[0], :: self.stride[1]]  # (n, inputs, h / stride, w / stride)
        return nn.functional.conv2d(x, self.weight)


class DropPath(nn.Module):
    """Drops each sample with probability `rate` in training and divides the kept ones by
    1 - rate, so that the mean stays what it is. (n, channels, h, w) -> the same.

    Around a residual branch this is the stochastic depth of Huang et al., "Deep networks with
    stochastic depth" (2016), which scales in evaluation instead.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        # Divided last: 1 / keep would be rounded to bf16 before it meets the values.
        return (x * self.draw(x)).div_(1 - self.rate)

    def draw(self, x: Tensor) -> Tensor:
        """(n, 1, 1, 1): 1 for the samples that are kept, 0 for the others."""
        return x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class Block(nn.Module):
    """Convolutions, each with its BatchNorm, and a shortcut around all;
    (n, inputs, h, w) -> (n, width * expansion, h / stride, w / stride)."""

    expansion: int
    fused = "none"  # see utils/fused
    relu: nn.Module
    downsample: nn.Module | None  # the shortcut; None: the input itself
    drop_path: nn.Module

    def units(self) -> list[tuple[nn.Module, nn.Module]]:
        """(convolution, norm) pairs from the input on; after the last one the shortcut is added."""
        raise NotImplementedError

    def forward(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        units = self.units()
        if is_fused(self, units[0][0].weight):
            shortcut = self.downsample or "input"
            return fused_block(x, units, shortcut, self.drop_path, chain, self.fused)
        shortcut = x if self.downsample is None else self.downsample(x)
        for conv, norm in units[:-1]:
            x = self.relu(norm(conv(x)))
        conv, norm = units[-1]
        return self.relu(self.drop_path(norm(conv(x))) + shortcut)


class BasicBlock(Block):
    """3x3, 3x3."""

    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int, downsample: nn.Module | None, drop_path: float
    ):
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def units(self):
        return [(self.conv1, self.bn1), (self.conv2, self.bn2)]


class Bottleneck(Block):
    """1x1, 3x3, 1x1."""

    expansion = 4

    def __init__(
        self, inputs: int, width: int, stride: int, downsample: nn.Module | None, drop_path: float
    ):
        super().__init__()
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def units(self):
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]


class Stage(nn.Sequential):
    """Blocks one after the other."""

    def forward(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        for block in self:
            x = block(x, chain)
        return x


class ResNet(nn.Module):
    """(n, channels, height, width) -> logits (n, classes).

    Args:
        depth: 18 and 34 of basic blocks, 50, 101 and 152 of bottlenecks.
        classes: number of logits.
        width: channels of the first stage, doubled in each of the next three; 64 in the paper.
        stem: "imagenet" (7x7, stride 2, max-pooling), "cifar" (3x3, stride 1) or "whiten"
            (whiten.py).
        channels: of the pictures: 3 for RGB, 1 for grey.
        zero_init_residual: the weight of the last BatchNorm of each block starts at 0, so that
            the network starts as its shortcuts alone (Goyal et al., 2017, section 5.1).
        drop_path: in training each sample skips the residual branch of a block with a probability
            that rises linearly from 0 in the first block to this in the last; 0 to below 1. (In
            the paper the first of L blocks has 1 / L of it.)
    """

    HEAD = "fc"  # the layer that depends on the classes: a transfer to others starts it anew
    BLOCKS = ("layer1", "layer2", "layer3", "layer4")
    fused = "none"

    def __init__(
        self,
        depth: int = 50,
        classes: int = 10,
        width: int = 64,
        stem: str = "cifar",
        channels: int = 3,
        zero_init_residual: bool = False,
        drop_path: float = 0.0,
    ):
        super().__init__()
        if depth not in STAGES:
            raise ValueError(f"depth is one of {sorted(STAGES)}, not {depth}")
        if stem not in STEMS:
            raise ValueError(f"stem is one of {STEMS}, not {stem!r}")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path lies between 0 and below 1, not {drop_path}")
        self.depth, self.width = depth, width
        block = BasicBlock if depth < 50 else Bottleneck
        inputs = width
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        elif stem == "cifar":
            self.conv1 = _conv3x3(channels, width)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = WhitenedStem(channels)
            self.maxpool = nn.Identity()
            inputs = self.conv1.outputs
        self.bn1 = nn.Identity() if stem == "whiten" else nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        total = sum(STAGES[depth])
        rates = [drop_path * index / (total - 1) for index in range(total)]
        for index, blocks in enumerate(STAGES[depth]):
            stride = 1 if index == 0 else 2
            stage = _stage(block, inputs, width << index, stride, rates[:blocks])
            self.add_module(f"layer{index + 1}", stage)
            inputs, rates = (width << index) * block.expansion, rates[blocks:]
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        self.convolutions = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        for conv in self.convolutions:
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if zero_init_residual and isinstance(module, block):
                _, last_norm = module.units()[-1]
                nn.init.zeros_(last_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        chain = Chain(self.convolutions) if is_fused(self, self.fc.weight) else None
        if isinstance(self.conv1, WhitenedStem):
            x = self.conv1(x)
        elif chain is not None:
            x = fused_block(x, [(self.conv1, self.bn1)], chain=chain, mode=self.fused)
        else:
            x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x, chain)
        if chain is not None:
            chain.end()
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def flags_for(self, tensors: dict[str, Tensor]) -> list[str] | None:
        """What to change so that the model has the shapes of `tensors`, as flags where there are
        any; empty where that cannot be told, None where no ResNet has them."""
        theirs = tensors.get("conv1.weight")
        if theirs is None or theirs.ndim != 4:
            return []
        ours, theirs = self.conv1.weight.shape, theirs.shape
        depth = depth_of(tensors)
        if depth is None:
            return None
        changes = []
        if theirs[2:] != ours[2:]:
            changes.append(f"--stem {({2: 'whiten', 7: 'imagenet'}).get(theirs[2], 'cifar')}")
        width = len(tensors["layer1.0.conv1.weight"])
        if width != self.width:
            changes.append(f"--width {width}")
        if depth != self.depth:
            changes.append(f"--depth {depth}")
        if theirs[1] != ours[1]:
            changes.append(f"pictures of {theirs[1]} channels")
        return changes


def depth_of(tensors: dict[str, Tensor]) -> int | None:
    """The depth of the ResNet that has these tensors, None where there is none."""
    blocks = [re.match(r"layer(\d)\.\d+\.conv1\.weight$", name) for name in tensors]
    counts = Counter(int(found[1]) for found in blocks if found)
    bottleneck = "layer1.0.conv3.weight" in tensors
    stages = tuple(counts[stage] for stage in (1, 2, 3, 4))
    matches = [d for d, blocks in STAGES.items() if blocks == stages and (d >= 50) == bottleneck]
    return matches[0] if matches else None


def _stage(block, inputs: int, width: int, stride: int, rates: list[float]) -> Stage:
    """Blocks with these drop-path rates; the first one has the stride and adapts the shortcut."""
    outputs = width * block.expansion
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
    first, *others = rates
    stage = [block(inputs, width, stride, downsample, first)]
    stage += [block(outputs, width, 1, None, rate) for rate in others]
    return Stage(*stage)
