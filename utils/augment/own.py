"""An augmentation of the user's own, `--augment FILE.py:NAME`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import user_files
from ..errors import UserError
from .chain import Augmentation


class OwnAugmentation(Augmentation):
    """A function of (pictures, generator), or a module of one picture, which draws from PyTorch's
    global generator. Pictures are uint8 (n, channels, height, width), before and after.

    The plan has a seed for each picture: a module is seeded with its picture's, a function's
    generator with that of the first one of the batch.

    Raises UserError if "path/to/file.py:name", `place`, cannot be found or fails with two pictures
    of `shape`, (height, width, channels).
    """

    def __init__(self, place: str, shape: tuple[int, int, int]):
        self.place = place
        self.found = user_files.find("--augment", place, "function", "my_augmentation", callable)
        self.apply(torch.zeros(2, *shape, dtype=torch.uint8), np.arange(2))

    def draw(self, n: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(2**63 - 1, size=n)

    def apply(self, images: Tensor, plan: np.ndarray, index: Any = None) -> Tensor:
        assert index is None  # it follows one that gathers
        if not len(images):  # a filler
            return images
        pictures = images.permute(0, 3, 1, 2)
        generator = torch.Generator(images.device).manual_seed(int(plan[0]))
        call = functools.partial(self.found, pictures, generator)
        takes = "it takes pictures (samples, channels, height, width) and a torch.Generator"
        if isinstance(self.found, torch.nn.Module):
            call = functools.partial(self._one_by_one, pictures, plan.tolist())
            takes = "it takes a picture (channels, height, width)"
        changed = user_files.attempt(call, f"--augment {self.place}", self.place, takes)
        told = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__
                for x in (changed, pictures)]  # fmt: skip
        if told[0] != told[1]:
            raise UserError(f"--augment {self.place} makes {told[0]} of {told[1]}, not the same")
        return changed.permute(0, 2, 3, 1)

    def _one_by_one(self, pictures: Tensor, seeds: list[int]) -> Tensor:
        changed = []
        with torch.random.fork_rng([pictures.device] if pictures.is_cuda else []):
            for picture, seed in zip(pictures, seeds, strict=True):
                torch.manual_seed(seed)
                changed.append(self.found(picture))
        return torch.stack(changed)
