"""What cpu.py and gpu.py train: a ResNet on made-up pictures, a Transformer on made-up texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.contenders import Rule, Texts, pad, usual_loader, usual_pictures, without_end
from benchmarks.made_up import (
    MEAN,
    STD,
    TOPICS,
    lengths_like_news,
    pictures,
    random_batch,
    texts,
)
from benchmarks.time_to_accuracy import Race
from utils.augment.crop_flip import CropFlip
from utils.data.images.loader import ImageLoader
from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer

CLASSES, VOCABULARY, MAX_LEN = 10, 30_000, 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases of cpu.py or gpu.py.

    Attributes:
        depth, picture_batch, layers, dim, ffn, text_batch: of the models and their batches.
        pictures, texts: in the made-up data sets, multiples of the batches.
        turn_seconds: approximate length of a turn.
        compile_seconds: with less time left, torch.compile is not started; it is stopped when it
            would take the time of the turns.
        precision: of autocast and of ours.
        race: the training to a target accuracy.
    """

    depth: int
    picture_batch: int
    pictures: int
    layers: int
    dim: int
    ffn: int
    text_batch: int
    texts: int
    turn_seconds: float
    compile_seconds: float
    precision: str
    race: Race


class Case:
    """A model and its data, for all contenders.

    Args:
        model: on the CPU.
        usual: () -> endless batches of `batch` samples on the host.
        loader: () -> ours.
        inputs: (samples) -> random ones, on the CPU.
        rebuild: () -> the same case; for another process.
    """

    def __init__(
        self, name: str, model: nn.Module, batch: int, rule: Rule, usual, loader, inputs, rebuild
    ):
        self.name, self.model, self.batch, self.rule = name, model, batch, rule
        self.usual, self.loader, self.inputs, self.rebuild = usual, loader, inputs, rebuild


def picture_case(sizes: Sizes, device: torch.device, workers: int) -> Case:
    images, labels = pictures(sizes.pictures, np.random.default_rng(0))
    batch = sizes.picture_batch

    def usual():
        return without_end(usual_loader(usual_pictures(images, labels), batch, workers, device))

    def ours():
        return ImageLoader(
            images, labels, mean=MEAN, std=STD, batch_size=batch, device=device,
            augment=CropFlip(32, 32), shuffle=True,
        )  # fmt: skip

    torch.manual_seed(0)
    name = f"ResNet-{sizes.depth}, CIFAR stem, pictures of 32x32, batch {batch}"
    rule = Rule("sgd", lr=0.01, weight_decay=5e-4)
    rebuild = partial(picture_case, sizes, device, workers)
    return Case(name, ResNet(sizes.depth, CLASSES), batch, rule, usual, ours, random_batch, rebuild)


def text_case(sizes: Sizes, device: torch.device, workers: int) -> Case:
    rng = np.random.default_rng(0)
    lengths = lengths_like_news(sizes.texts, MAX_LEN, rng)
    data, batch = texts(lengths, VOCABULARY, rng), sizes.text_batch

    def usual():
        return without_end(usual_loader(Texts(*data), batch, workers, device, pad))

    def ours():  # steps of equal work, so that all turns are alike
        return EqualTokensLoader(
            *data, batch_size=batch, device=device, max_len=MAX_LEN, shuffle=True,
            batch_tokens=math.ceil(batch * lengths.mean()),
        )  # fmt: skip

    def inputs(n: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (n, 45))

    torch.manual_seed(0)
    model = Transformer(
        VOCABULARY, TOPICS, sizes.layers, sizes.dim, sizes.dim // 64, sizes.ffn, MAX_LEN,
        dropout=0.1, attention_dropout=0.0,
    )  # fmt: skip
    name = (
        f"Transformer of {sizes.layers} layers of {sizes.dim}, texts of {lengths.mean():.0f} "
        f"tokens on average, batch {batch}"
    )
    rule = Rule("adamw", lr=1e-4, weight_decay=0.01)
    rebuild = partial(text_case, sizes, device, workers)
    return Case(name, model, batch, rule, usual, ours, inputs, rebuild)
