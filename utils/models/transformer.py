"""A Transformer encoder that classifies texts, and computes nothing for padding.

Vaswani et al., "Attention is all you need" (2017), with the norm before each branch as in Xiong et
al., "On layer normalization in the transformer architecture" (2020), arXiv:2002.04745. All layers
but attention see the tokens of a batch as one row, without padding. Attention needs them text by
text: on a GPU in half precision `varlen_attn` reads them from that row; else they are spread over
the padded layout, in which a mask keeps the padding out, and collected from it.

Texts are mixed in one of two places. "embeddings": Guo, Mao and Zhang, "Augmenting data with mixup
for sentence classification" (2019), arXiv:1905.08941, wordMixup; "sentence": the representation
that the classifier reads, senMixup there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.attention.varlen import varlen_attn

from utils.fused import is_fused
from utils.fused.transformer import feed_forward, norm_linear
from utils.models.dropout import Dropout, dropout
from utils.packed import PackedTokens

# A window as wide as the longest text leaves nothing out, and PyTorch takes FlashAttention for it.
# Without one, PyTorch 2.11 to 2.14 take cuDNN's attention on Hopper and Blackwell for texts of over
# 128 tokens, which makes a plan for every new length. 2.10 has no window, and always takes
# FlashAttention; 2.15 does where `prefer_flash_attention` was called.
WINDOWS = "window_size" in inspect.signature(varlen_attn).parameters

POOLINGS = ("cls", "mean")
MIXUP_PLACES = ("sentence", "embeddings")


class _Spread(torch.autograd.Function):
    """(rows, width) -> (size, width), where `place` says, and 0 elsewhere; rows beyond the places
    are left out. The places differ, so that the gradient only has to be collected, and the other
    way round: PyTorch would add it up."""

    @staticmethod
    def forward(ctx, rows: Tensor, place: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = rows.shape[0]
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, place, rows[: place.shape[0]])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Collect.apply(grad, *ctx.saved_tensors, ctx.count), None, None


class _Collect(torch.autograd.Function):
    """(size, width) -> (count, width); 0 in the rows beyond the places."""

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
        return _Spread.apply(grad, *ctx.saved_tensors, ctx.size), None, None


class Layout(NamedTuple):
    """Which rows of a tensor (rows, width) are the tokens of which text.

    Packed, the rows are the real tokens, and maybe some more at the end. On the grid (`offsets` is
    None) they are n * longest. No text reads the rows that are no tokens: their gradient is 0.
    """

    n: int
    longest: int
    lengths: Tensor  # (n,) int64
    keys: Tensor | None  # (n, 1, 1, longest) bool: the real tokens; None: all are
    place: Tensor | None = None  # (tokens,) int64, on the grid; None: it is the grid's own order
    offsets: Tensor | None = None  # (n + 1,) int32: where each text's rows begin
    rows: int = 0  # of the tensor, where there is a place

    def spread(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, longest, width), 0 beyond a text's end where it is packed."""
        if self.place is not None:
            rows = _Spread.apply(rows, self.place, self.n * self.longest)
        return rows.view(self.n, self.longest, rows.shape[1])

    def collect(self, grid: Tensor) -> Tensor:
        """(n, longest, width) -> (rows, width)."""
        rows = grid.reshape(self.n * self.longest, grid.shape[2])
        return rows if self.place is None else _Collect.apply(rows, self.place, self.rows)

    def first(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, width): each text's first token."""
        if self.place is not None:
            return _Collect.apply(rows, self.offsets[:-1].long(), self.n)
        return rows.view(self.n, self.longest, rows.shape[1])[:, 0]

    def mean(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (n, width), over each text's tokens."""
        return self.real(self.spread(rows)).sum(1) / self.lengths[:, None]

    def real(self, grid: Tensor) -> Tensor:
        """(n, longest, width), 0 beyond a text's end."""
        if self.place is not None or self.keys is None:
            return grid
        return grid * self.keys.view(self.n, self.longest, 1)


def packed_layout(texts: PackedTokens, rows: int) -> Layout:
    n, longest, tokens = texts.samples, texts.longest, texts.ids.shape[0]
    lengths = texts.offsets.diff().long()
    keys = None if tokens == n * longest else _keys(lengths, longest)  # known to the host
    if keys is None and rows == tokens:
        return Layout(n, longest, lengths, None, None, texts.offsets)
    return Layout(n, longest, lengths, keys, texts.place, texts.offsets, rows)


def rows_for(tokens: int, device: torch.device) -> int:
    """Rows for so many tokens: on a CPU in half precision up to 63, or 1/32, more. There oneDNN
    compiles every product anew for another number of rows, so that few numbers are better."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu") or is_compiling():
        return tokens
    step = max(64, 1 << tokens.bit_length() >> 6)
    return -(-tokens // step) * step


def grid_layout(lengths: Tensor, longest: int) -> Layout:
    return Layout(lengths.shape[0], longest, lengths, _keys(lengths, longest))


def _keys(lengths: Tensor, longest: int) -> Tensor:
    position = torch.arange(longest, device=lengths.device)
    return (position < lengths[:, None])[:, None, None]


class Attention(nn.Module):
    """Every token looks at all tokens of its text."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, layout: Layout, first_only: bool = False, linear: Callable = F.linear
    ) -> Tensor:
        """(rows, dim) -> the same, or (n, dim), for the first token of each text only. `linear`:
        (x, weight, bias) -> queries, keys and values."""
        weight, bias = self.qkv.weight, self.qkv.bias
        if first_only:
            dim = x.shape[1]
            q = linear(layout.first(x), weight[:dim], bias[:dim])  # (n, dim)
            k, v = linear(x, weight[dim:], bias[dim:]).chunk(2, 1)  # (rows, dim) each
        else:
            q, k, v = linear(x, weight, bias).chunk(3, 1)
        rate = self.dropout if self.training else 0.0
        if layout.offsets is not None and not rate and _varlen_works(q, self.heads):
            q, k, v = (part.unflatten(1, (self.heads, -1)) for part in (q, k, v))
            ends, longest = layout.offsets, layout.longest
            q_ends, q_longest = ends, longest
            if first_only:
                q_ends, q_longest = torch.arange(layout.n + 1, device=ends.device).int(), 1
            window = {"window_size": (longest, longest)} if WINDOWS else {}
            mixed = varlen_attn(q, k, v, q_ends, ends, q_longest, longest, **window)
            return self.out(mixed.flatten(1))
        q = q[:, None] if first_only else layout.spread(q)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (q, layout.spread(k), layout.spread(v))
        )  # (n, heads, 1 or longest, dim / heads)
        mixed = attend(q, k, v, layout.keys, rate)
        mixed = mixed.transpose(1, 2).flatten(2)  # (n, 1 or longest, dim)
        return self.out(mixed[:, 0] if first_only else layout.collect(mixed))


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rate: float) -> Tensor:
    """softmax(q k' / sqrt(d)) v, over the real keys, its weights with dropout.

    Args:
        q: (n, heads, queries, d).
        k, v: (n, heads, longest, d).
        keys: (n, 1, 1, longest) bool, at least one of a text; None: all are real.
    Returns:
        (n, heads, queries, d).
    """
    if not rate or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, keys, rate)
    # With dropout PyTorch has no fused kernel for CPUs, and what it does instead takes longer.
    scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
    if keys is not None:
        scores = scores + torch.where(keys, 0.0, -torch.inf).to(scores.dtype)
    return dropout(scores.softmax(3), rate).to(v.dtype) @ v


def _varlen_works(q: Tensor, heads: int) -> bool:
    """Attention over packed rows: FlashAttention, in half precision. It knows no dropout, its
    gradient has no gradient, and its order of addition is not fixed."""
    width = q.shape[1] // heads
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and torch.backends.cuda.flash_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    fused = "none"  # see utils/fused

    def __init__(self, dim: int, heads: int, ffn: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, attention_dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.fc2 = nn.Linear(ffn, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, layout: Layout, first_only: bool = False) -> Tensor:
        """(rows, dim) -> the same, or (n, dim), of the first token of each text only."""
        if is_fused(self, self.fc1.weight):
            return self._fused(x, layout, first_only)
        attended = self.dropout(self.attention(self.norm1(x), layout, first_only))
        x = (layout.first(x) if first_only else x) + attended
        hidden = self.dropout(F.gelu(self.fc1(self.norm2(x))))
        return x + self.dropout(self.fc2(hidden))

    def _fused(self, x: Tensor, layout: Layout, first_only: bool) -> Tensor:
        rate = self.dropout.rate if self.training else 0.0
        project = partial(norm_linear, self.norm1, mode=self.fused)
        attended = self.attention(x, layout, first_only, project)
        x = layout.first(x) if first_only else x
        return feed_forward(x, attended, self.norm2, self.fc1, self.fc2, rate, self.fused)


class Transformer(nn.Module):
    """Texts -> logits (n, classes).

    Args:
        vocab_size: number of token ids.
        classes: number of logits.
        layers: of the encoder.
        dim: width of a token's representation, a multiple of `heads`.
        heads: of attention.
        ffn: width of the hidden layer that follows attention.
        max_len: most tokens of a text.
        dropout: share set to 0 in training: of the embeddings, the output of attention and of the
            layer that follows it, that layer's hidden values and what the classifier reads.
        attention_dropout: of the weights of attention; None: `dropout`. Only with 0 training has
            attention without padding on a GPU, and a fused kernel on a CPU.
        token_dropout: share of the tokens that are not seen in training, their positions aside
            (Iyyer et al., "Deep unordered composition rivals syntactic methods for text
            classification" (2015), section 3.1); the others are divided by 1 - share.
        pooling: what the classifier reads: "cls", the first token of a text, or "mean", of all.
        mixup_at: where a plan mixes the texts: "sentence" or "embeddings" (see above).
        pad: the id that fills up a padded tensor of ids.
    """

    HEAD = "head"  # the layer that depends on the classes: a transfer to others starts it anew
    mixes_inside = True  # forward takes the plan by which the texts are mixed
    rounds_rows = True  # see `rows_for`; not while memory is counted (training/batch_probe.py)

    def __init__(
        self,
        vocab_size: int,
        classes: int,
        layers: int = 6,
        dim: int = 512,
        heads: int = 8,
        ffn: int = 1024,
        max_len: int = 256,
        dropout: float = 0.1,
        attention_dropout: float | None = None,
        token_dropout: float = 0.0,
        pooling: str = "cls",
        mixup_at: str = "sentence",
        pad: int = 0,
    ):
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers is at least 1, not {layers}")
        if dim % heads:
            raise ValueError(f"dim is a multiple of heads, and {dim} is none of {heads}")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is one of {POOLINGS}, not {pooling!r}")
        if mixup_at not in MIXUP_PLACES:
            raise ValueError(f"mixup_at is one of {MIXUP_PLACES}, not {mixup_at!r}")
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        for rate in (dropout, attention_dropout, token_dropout):
            if not 0 <= rate < 1:
                raise ValueError(f"dropout lies between 0 and below 1, not {rate}")
        self.max_len, self.pooling, self.mixup_at, self.pad = max_len, pooling, mixup_at, pad
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(
            EncoderLayer(dim, heads, ffn, dropout, attention_dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.dropout, self.token_dropout = Dropout(dropout), Dropout(token_dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, inputs: PackedTokens | Tensor, mixing=None) -> Tensor:
        """Logits (n, classes).

        Args:
            inputs: PackedTokens, or ids (n, length) int64, padded at the end with `pad`. The first
                token of a text is never taken for padding.
            mixing: None, or how the texts are mixed: `apply` (n, ...) -> (n, ...), `partner` (n,)
                int64 and `lam` (n,) (see utils/mixup/mixing.py). As embeddings a text counts as
                zeros beyond its end, and one with weight 0 for nothing.
        """
        on_grid = mixing is not None and self.mixup_at == "embeddings"
        if isinstance(inputs, Tensor):
            x, layout = self._embed_grid(inputs)
        else:
            x, layout = self._embed_packed(inputs, rounded=self.rounds_rows and not on_grid)
        if on_grid:
            x, layout = _mix_embeddings(x, layout, mixing)
        x, cls = self.dropout(x), self.pooling == "cls"
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            x = layer(x, layout, first_only=cls and last)
        x = self.norm(x)
        if not cls:
            x = layout.mean(x)  # (n, dim)
        if mixing is not None and self.mixup_at == "sentence":
            x = mixing.apply(x)
        return self.head(self.dropout(x))

    def _embed_packed(self, texts: PackedTokens, rounded: bool) -> tuple[Tensor, Layout]:
        self._check(texts.longest)
        ids, position = texts.ids, texts.place.remainder(texts.longest)
        rows = rows_for(ids.shape[0], ids.device) if rounded else ids.shape[0]
        if rows != ids.shape[0]:
            more = (0, rows - ids.shape[0])
            ids, position = F.pad(ids, more), F.pad(position, more)
        return self._seen(ids) + self.positions(position), packed_layout(texts, rows)

    def _embed_grid(self, ids: Tensor) -> tuple[Tensor, Layout]:
        length = ids.shape[1]
        if not is_compiling():  # an exported graph states it as its range
            self._check(length)
        x = self._seen(ids) + self.positions.weight[:length]  # (n, length, dim)
        lengths = (ids != self.pad).sum(1).clamp_min(1)
        return x.flatten(0, 1), grid_layout(lengths, length)

    def _seen(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim), embeddings of the tokens, 0 where one is dropped."""
        x = self.tokens(ids)
        if not (self.training and self.token_dropout.rate):
            return x
        return x * self.token_dropout(x.new_ones(*ids.shape, 1))

    def _check(self, longest: int) -> None:
        if longest > self.max_len:
            raise ValueError(f"a text of {longest} tokens, and max_len is {self.max_len}")


def _mix_embeddings(x: Tensor, layout: Layout, mixing) -> tuple[Tensor, Layout]:
    """Rows of a grid, on which a text is as long as the longer one of those mixed."""
    grid = layout.real(layout.spread(x))  # (n, longest, dim)
    lam, own = mixing.lam.detach(), layout.lengths
    lengths = torch.maximum(own * (lam > 0), own[mixing.partner] * (lam < 1))
    return mixing.apply(grid).flatten(0, 1), grid_layout(lengths, layout.longest)
