"""Where the tokens of a batch of texts are: packed one after the other, or in a padded grid.

What moves rows from one to the other has gradients that are plain gathers and scatters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..packed import PackedTokens


class _Scatter(torch.autograd.Function):
    """(rows, width) -> (size, width): row i goes to index place[i], other rows of the result are 0;
    rows beyond the end of `place` are dropped.

    The indices are distinct, so the gradient is a plain gather, and that of `_Gather` a plain
    scatter; PyTorch's own backward would accumulate."""

    @staticmethod
    def forward(ctx, rows: Tensor, place: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = rows.shape[0]
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, place, rows[: place.shape[0]])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Gather.apply(grad, *ctx.saved_tensors, ctx.count), None, None


class _Gather(torch.autograd.Function):
    """(size, width) -> (count, width): row i comes from index place[i]; rows beyond the end of
    `place` are 0."""

    @staticmethod
    def forward(ctx, grid: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.size = grid.shape[0]
        if count == place.shape[0]:
            return grid.index_select(0, place)
        rows = grid.new_zeros(count, grid.shape[1])
        torch.index_select(grid, 0, place, out=rows[: place.shape[0]])
        return rows

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Scatter.apply(grad, *ctx.saved_tensors, ctx.size), None, None


class Layout(NamedTuple):
    """Which rows of a tensor (rows, width) are the tokens of which text.

    Packed, the rows are the real tokens, and possibly unused rows at the end. Padded (`offsets` is
    None), they are the n * longest positions of the grid (n, longest). Nothing reads unused rows or
    padding, so their gradient is 0.
    """

    n: int
    longest: int
    lengths: Tensor  # (n,) int64
    keys: Tensor | None  # (n, 1, 1, longest) bool: the real tokens; None: all are real
    place: Tensor | None = None  # (tokens,) int64: index in the grid; None: rows are in grid order
    offsets: Tensor | None = None  # (n + 1,) int32: first row of each text
    rows: int = 0  # number of rows, where `place` is given
    fillers: int = 0  # how many of the n texts, the last ones, are fillers (utils/packed.py)

    def to_grid(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, longest, width); 0 beyond a text's end if packed, else unchanged."""
        if self.place is not None:
            rows = _Scatter.apply(rows, self.place, self.n * self.longest)
        return rows.view(self.n, self.longest, rows.shape[1])

    def from_grid(self, grid: Tensor) -> Tensor:
        """(n, longest, width) -> (rows, width)."""
        rows = grid.reshape(self.n * self.longest, grid.shape[2])
        return rows if self.place is None else _Gather.apply(rows, self.place, self.rows)

    def first(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, width): each text's first token."""
        if self.place is not None and self.offsets is not None:
            return _Gather.apply(rows, self.offsets[:-1].long(), self.n)
        return rows.view(self.n, self.longest, rows.shape[1])[:, 0]

    def mean(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, width): mean over each text's tokens."""
        return self.zero_padding(self.to_grid(rows)).sum(1) / self.lengths[:, None]

    def real(self, texts: Tensor) -> Tensor:
        """(n, ...) -> (n - fillers, ...): without the fillers."""
        return texts[: self.n - self.fillers] if self.fillers else texts

    def zero_padding(self, grid: Tensor) -> Tensor:
        """(n, longest, width) with 0 beyond each text's end."""
        if self.place is not None or self.keys is None:
            return grid
        return grid * self.keys.view(self.n, self.longest, 1)


def packed_layout(texts: PackedTokens, rows: int) -> Layout:
    n, longest, tokens = texts.samples + texts.fillers, texts.longest, texts.ids.shape[0]
    lengths = texts.offsets.diff().long()
    full = not is_compiling() and tokens == n * longest  # no host sync; compiled once for both
    keys = None if full else _keys(lengths, longest)
    if keys is None and rows == tokens:
        return Layout(n, longest, lengths, None, None, texts.offsets, fillers=texts.fillers)
    return Layout(n, longest, lengths, keys, texts.place, texts.offsets, rows, texts.fillers)


def rows_for(tokens: int, device: torch.device) -> int:
    """Number of rows for a batch of `tokens`. On a CPU in half precision it is rounded up, by at
    most 63 rows or 1/32: there oneDNN compiles each matrix product for every new number of rows, so
    the fewer different numbers the better."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu") or is_compiling():
        return tokens
    step = max(64, 1 << tokens.bit_length() >> 6)
    return -(-tokens // step) * step


def grid_layout(lengths: Tensor, longest: int) -> Layout:
    return Layout(lengths.shape[0], longest, lengths, _keys(lengths, longest))


def _keys(lengths: Tensor, longest: int) -> Tensor:
    position = torch.arange(longest, device=lengths.device)
    return (position < lengths[:, None])[:, None, None]
