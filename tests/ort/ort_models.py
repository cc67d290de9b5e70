"""Small models that ONNX Runtime trains, and batches for them."""

import numpy as np
import torch
from torch import nn

from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.models.vit import ViT
from utils.packed import PackedTokens, pack

CPU = torch.device("cpu")
CLASSES, VOCABULARY = 5, 50


def resnet(depth: int = 18, **options) -> ResNet:
    return ResNet(depth, CLASSES, width=8, **options)


def transformer(dropout: float = 0.0, **options) -> Transformer:
    return Transformer(VOCABULARY, CLASSES, 2, 16, 2, 32, max_len=20, dropout=dropout, **options)


def vit(**options) -> ViT:
    return ViT(CLASSES, 16, 16, patch=4, layers=2, dim=16, heads=2, ffn=32, **options)


def pictures(n: int, side: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, side, side, generator=generator)


def texts(*lengths: int) -> PackedTokens:
    lengths = np.array(lengths)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, lengths.sum())
    return pack(tokens, np.cumsum(lengths) - lengths, lengths, CPU)


MODELS = {
    "ResNet-18": (resnet, lambda: pictures(12)),
    "ResNet-50": (lambda: resnet(50, stem="imagenet"), lambda: pictures(12, 64)),
    "Transformer": (transformer, lambda: texts(3, 7, 1, 7, 12)),
    "mean of a Transformer": (lambda: transformer(pooling="mean"), lambda: texts(3, 7, 12)),
    "ViT": (vit, lambda: pictures(6)),
    "MLP": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.ReLU(), nn.Linear(9, 5)),
            lambda: pictures(6)),
}  # fmt: skip
