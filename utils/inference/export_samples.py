"""Samples by which an exported model is traced and checked, and how they become its inputs."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images.loader import Normalize
from ..data.texts.tokenizer import cls_id, pad_id, tokenizer_from_json, vocabulary_size
from ..weights.card import ModelCard, TextCard

SAMPLES = 5  # in a check; not 2 as in `example`, so that a batch of fixed size fails the check


class PictureSamples:
    """Samples for a model of pictures.

    `name` is that of the graph's input, `what` the samples in messages.
    """

    name, what = "images", "pictures"

    def __init__(self, card: ModelCard):
        self.card = card
        self.normalize = Normalize(card.mean, card.std, card.width, torch.device("cpu"))

    def example(self) -> Tensor:
        """(2, height, width, channels) uint8, for tracing."""
        card = self.card
        return torch.zeros(2, card.height, card.width, card.channels, dtype=torch.uint8)

    def random(self) -> np.ndarray:
        """(SAMPLES, height, width, channels) uint8: noise of several strengths, black, white."""
        shape = (SAMPLES, *self.example().shape[1:])
        pictures = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        pictures[1] //= 4
        pictures[-2], pictures[-1] = 0, 255
        return pictures

    def prepared(self, pictures: np.ndarray) -> Tensor:
        """The model's inputs, normalised as in training: (n, channels, height, width) float32."""
        return self.normalize(torch.from_numpy(pictures))

    def dynamic_shapes(self) -> dict:
        return {0: torch.export.Dim("batch")}

    def graph(self, model: nn.Module) -> nn.Module:
        return _FromPixels(model, self.card)


class TextSamples:
    """Samples for a model of texts; see PictureSamples.

    Args:
        size: of the vocabulary.
        pad: the token id of padding.
        max_len: the most tokens of a text.
    """

    name, what = "ids", "texts"

    def __init__(self, size: int, pad: int, max_len: int):
        self.size, self.pad, self.max_len = size, pad, max_len
        self.length = min(max_len, 24)

    def example(self) -> Tensor:
        """(2, length) int64, for tracing."""
        return torch.from_numpy(self.random()[:2, : max(2, self.length // 2)])

    def random(self) -> np.ndarray:
        """(SAMPLES, length) int64: texts of several lengths, the shortest of one token."""
        ids = np.random.default_rng(0).integers(0, self.size, (SAMPLES, self.length))
        ids[ids == self.pad] = (self.pad + 1) % self.size
        lengths = np.linspace(self.length, 1, SAMPLES).astype(int)
        return np.where(np.arange(self.length) < lengths[:, None], ids, self.pad)

    def prepared(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids)

    def dynamic_shapes(self) -> dict:
        return {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=self.max_len)}

    def graph(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Softmax(1))


def samples_for(card: ModelCard | TextCard) -> PictureSamples | TextSamples:
    if not isinstance(card, TextCard):
        return PictureSamples(card)
    tokenizer = tokenizer_from_json(card.tokenizer)
    return TextSamples(vocabulary_size(tokenizer), pad_id(tokenizer), card.max_len)


def metadata_of(card: ModelCard | TextCard) -> dict:
    """What is kept with the graph: what its inputs are made by, and the classes."""
    values = card.to_dict()
    if not isinstance(card, TextCard):
        return {name: values[name] for name in ("classes", "mean", "std", "form")}
    tokenizer = tokenizer_from_json(card.tokenizer)
    pad = pad_id(tokenizer)
    tokens = {"pad_id": pad, "pad_token": tokenizer.id_to_token(pad), "cls_id": cls_id(tokenizer)}
    return {name: values[name] for name in ("classes", "max_len", "clean", "line_end")} | tokens


class _FromPixels(nn.Module):
    """uint8 (n, height, width, channels) -> probabilities (n, classes)."""

    def __init__(self, model: nn.Module, card: ModelCard):
        super().__init__()
        self.model = model
        normalize = Normalize(card.mean, card.std, 1, torch.device("cpu"))
        self.register_buffer("scale", normalize.scale)  # (channels,)
        self.register_buffer("shift", normalize.shift)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.float() * self.scale + self.shift
        return self.model(pixels.permute(0, 3, 1, 2)).softmax(1)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in float32 on the CPU, in evaluation mode."""
    return copy.deepcopy(model).cpu().float().eval()
