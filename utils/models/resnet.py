"""ResNet, with torchvision's names, so that weights move freely between there and here.

He et al., "Deep residual learning for image recognition" (2016). The 3x3 convolution of a
bottleneck carries the stride, as in torchvision ("ResNet v1.5"). The CIFAR stem (3x3, stride 1, no
pooling) keeps 32x32 pictures from shrinking to one pixel.
"""

import torch
from torch import Tensor, nn

# depth -> blocks in each of the four stages
STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STEMS = ("cifar", "imagenet")


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

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride[0], :: self.stride[1]]  # (n, inputs, h / stride, w / stride)
        return nn.functional.conv2d(x, self.weight)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; (n, inputs, h, w) -> (n, width, h / stride, w / stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None):
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.relu(x + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1; (n, inputs, h, w) -> (n, 4 * width, h / stride, w / stride)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None):
        super().__init__()
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + shortcut)


class ResNet(nn.Module):
    """(n, 3, height, width) -> logits (n, classes).

    Args:
        depth: 18 and 34 of basic blocks, 50, 101 and 152 of bottlenecks.
        classes: number of logits.
        width: channels of the first stage, doubled in each of the next three; 64 in the paper.
        stem: "imagenet" (7x7, stride 2, max-pooling) or "cifar" (3x3, stride 1).
    """

    def __init__(self, depth: int = 50, classes: int = 10, width: int = 64, stem: str = "cifar"):
        super().__init__()
        if depth not in STAGES:
            raise ValueError(f"depth is one of {sorted(STAGES)}, not {depth}")
        if stem not in STEMS:
            raise ValueError(f"stem is one of {STEMS}, not {stem!r}")
        block = BasicBlock if depth < 50 else Bottleneck
        self.channels = width
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = _conv3x3(3, width)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        for index, blocks in enumerate(STAGES[depth]):
            stage = self._stage(block, width << index, blocks, stride=1 if index == 0 else 2)
            self.add_module(f"layer{index + 1}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, block, width: int, blocks: int, stride: int) -> nn.Sequential:
        outputs = width * block.expansion
        downsample = None
        if stride != 1 or self.channels != outputs:
            downsample = nn.Sequential(
                _conv1x1(self.channels, outputs, stride), nn.BatchNorm2d(outputs)
            )
        stage = [block(self.channels, width, stride, downsample)]
        stage += [block(outputs, width, 1, None) for _ in range(blocks - 1)]
        self.channels = outputs
        return nn.Sequential(*stage)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
