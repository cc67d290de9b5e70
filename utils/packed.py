"""Texts of different lengths as one row of tokens: what the loader makes and the model reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .to_device import to_device


class PackedTokens(NamedTuple):
    """n texts, their tokens one after the other, without padding.

    After them there may be fillers: texts that models leave out of what they return, so that
    batches of different texts have the same shapes, as a CUDA graph needs.

    `len` of it is the number of its fields, and a slice of it some of them: `samples` and
    `first` are what is meant.
    """

    ids: Tensor  # (tokens,) int64
    # (tokens,) int64: sample * longest + position, the token's place in the padded layout
    place: Tensor
    offsets: Tensor  # (n + fillers + 1,) int32: where each text begins, and where the last one ends
    longest: int  # no text has more tokens than this
    # int64: `offsets` on the host, which so never asks the device. None in a filled batch: these
    # numbers are not the same for all batches that a graph takes.
    borders: np.ndarray | None
    fillers: int = 0

    @property
    def samples(self) -> int:
        return self.offsets.shape[0] - 1 - self.fillers

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def padded(self, pad: int) -> Tensor:
        """(n, longest) int64: the texts side by side, with the id `pad` after their ends."""
        texts = self.samples + self.fillers
        grid = torch.full((texts * self.longest,), pad, device=self.device)
        grid.index_copy_(0, self.place, self.ids)
        return grid.view(texts, self.longest)[: self.samples]

    def first(self, k: int) -> PackedTokens:
        """The first k texts, in the same memory; all of them where there are no more. In a filled
        batch the others become fillers."""
        k = min(k, self.samples)
        if self.borders is None:
            return self._replace(fillers=self.samples - k + self.fillers)
        tokens = int(self.borders[k])
        return self._replace(
            ids=self.ids[:tokens],
            place=self.place[:tokens],
            offsets=self.offsets[: k + 1],
            borders=self.borders[: k + 1],
        )


def pack(
    tokens: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    longest: int | None = None,
) -> PackedTokens:
    """Texts out of one long row of tokens, on the device; the host does not wait for it.

    Args:
        tokens: (all,) of any integer type, in memory or mapped from a file.
        starts: (n,) int64, where each text begins in `tokens`.
        lengths: (n,) int64, its tokens, at least 1; n may be 0.
        longest: at least the longest length; None: that.
    """
    n, longest = len(lengths), longest or int(lengths.max(initial=1))
    borders = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=borders[1:])
    token = np.arange(borders[-1])
    both = np.empty((2, len(token)), np.int64)
    both[0] = tokens[token + np.repeat(starts - borders[:-1], lengths)]
    both[1] = token + np.repeat(np.arange(0, n * longest, longest) - borders[:-1], lengths)
    moved, offsets = to_device(both, device), to_device(borders.astype(np.int32), device)
    return PackedTokens(moved[0], moved[1], offsets, longest, borders)
