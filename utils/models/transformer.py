"""A Transformer encoder for text classification that computes nothing for padding.

Vaswani et al., "Attention is all you need" (2017), with pre-norm as in Xiong et al., "On layer
normalization in the transformer architecture" (2020), arXiv:2002.04745. All layers but attention
take the tokens of a batch packed, as (tokens, width) without padding. Attention works per text: on
a GPU in half precision FlashAttention takes the packed tokens; elsewhere they are scattered to the
padded layout, where a mask excludes the padding, and gathered from it afterwards.

Texts are mixed in one of two places, as in Guo, Mao and Zhang, "Augmenting data with mixup for
sentence classification" (2019), arXiv:1905.08941: at "embeddings" (the paper's wordMixup) or at
"sentence", the classifier's input (senMixup).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..fused import is_fused
from ..fused.cast import autocast_together
from ..fused.dropout import Dropout, dropout
from ..fused.transformer import feed_forward, norm_linear
from ..packed import PackedTokens
from .text_layout import Layout, grid_layout, packed_layout, rows_for

POOLINGS = ("cls", "mean")
MIXUP_PLACES = ("sentence", "embeddings")


class Attention(nn.Module):
    """Self-attention within each text."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, layout: Layout, first_only: bool = False, linear: Callable = F.linear
    ) -> Tensor:
        """(rows, dim) -> (rows, dim), or with `first_only` (n, dim): each text's first token alone.
        `linear`: (x, weight, bias) -> queries, keys and values."""
        weight, bias, *out = autocast_together(self.qkv, self.out)
        if first_only:
            dim = x.shape[1]
            weights, biases = weight.split([dim, 2 * dim]), bias.split([dim, 2 * dim])
            q = linear(layout.first(x), weights[0], biases[0])  # (n, dim)
            k, v = linear(x, weights[1], biases[1]).chunk(2, 1)  # (rows, dim) each
        else:
            q, k, v = linear(x, weight, bias).chunk(3, 1)
        rate = self.dropout if self.training else 0.0
        return F.linear(attend_rows(q, k, v, layout, self.heads, rate, first_only), *out)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, heads: int, rate: float,
    first_only: bool = False, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention within each text.

    Args:
        q: (rows, dim), or with `first_only` (n, dim): of each text's first token alone.
        k, v: (rows, dim).
        rate: of dropout on the weights.
        window: a token attends to those at most this far away; None: to all.
    Returns:
        as `q`.
    """
    if window is not None and window >= layout.longest - 1:
        window = None
    # FlashAttention refuses a batch without texts, which a rank may have.
    packed = layout.offsets is not None and layout.n > 0 and not rate
    if packed and varlen_works(q, heads):
        q, k, v = (part.unflatten(1, (heads, -1)) for part in (q, k, v))
        q_ends, q_longest = ends, longest = layout.offsets, layout.longest
        if first_only:
            q_ends, q_longest = torch.arange(layout.n + 1, dtype=torch.int32, device=q.device), 1
        return flash_attention(q, k, v, q_ends, ends, q_longest, longest, window).flatten(1)
    q = q[:, None] if first_only else layout.to_grid(q)
    q, k, v = (
        part.unflatten(2, (heads, -1)).transpose(1, 2)
        for part in (q, layout.to_grid(k), layout.to_grid(v))
    )  # (n, heads, 1 or longest, dim / heads)
    keys = layout.keys
    if window is not None:
        place = torch.arange(layout.longest, device=q.device)
        near = (place[:, None] - place).abs() <= window
        keys = near if keys is None else keys & near
    attended = attend(q, k, v, keys, rate)
    attended = attended.transpose(1, 2).flatten(2)  # (n, 1 or longest, dim)
    return attended[:, 0] if first_only else layout.from_grid(attended)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, ends: Tensor, q_longest: int, longest: int,
    window: int | None,
) -> Tensor:  # fmt: skip
    """On packed texts, (rows, heads, width) each. PyTorch's varlen_attn does the same within an
    operation in Python, or by cuDNN, which makes a plan for every new length."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, q_ends, ends, q_longest, longest, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, window_size_left=window, window_size_right=window,
    )[0]  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rate: float) -> Tensor:
    """dropout(softmax(q k' / sqrt(d))) v, over the real keys.

    Args:
        q: (n, heads, queries, d).
        k, v: (n, heads, longest, d).
        keys: bool, as (n, 1, 1, longest), at least one true for each query; None: all keys are
            real.
    Returns:
        (n, heads, queries, d).
    """
    if not rate or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, keys, rate)
    # PyTorch has no fused CPU kernel with dropout, and its fallback is slower than this.
    scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
    if keys is not None:
        scores = scores + torch.where(keys, 0.0, -torch.inf).to(scores.dtype)
    return dropout(scores.softmax(3), rate).to(v.dtype) @ v


def varlen_works(q: Tensor, heads: int) -> bool:
    """Whether attention can run on packed rows: FlashAttention, in half precision. That has no
    second derivative, and its summation order is not deterministic."""
    width = q.shape[1] // heads
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and not torch.are_deterministic_algorithms_enabled()
        and has_flash_attention()
    )


def has_flash_attention() -> bool:
    """Whether this process's GPU has it, and it is not switched off."""
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
    )


# The compiler cannot trace these questions: it is to take the answer as a constant. This is what
# torch.compiler.assume_constant_result does, which would import the compiler for it, in seconds.
has_flash_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function


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
        """(rows, dim) -> (rows, dim), or with `first_only` (n, dim): the first token of each
        text alone."""
        if is_fused(self, self.fc1.weight):
            return self._fused(x, layout, first_only)
        attended = self.dropout(self.attention(self.norm1(x), layout, first_only))
        x = (layout.first(x) if first_only else x) + attended
        w1, b1, w2, b2 = autocast_together(self.fc1, self.fc2)
        hidden = self.dropout(F.gelu(F.linear(self.norm2(x), w1, b1)))
        return x + self.dropout(F.linear(hidden, w2, b2))

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
        layers: number of encoder layers.
        dim: width of the token representations, a multiple of `heads`.
        heads: number of attention heads.
        ffn: hidden width of the feed-forward layers.
        max_len: maximum number of tokens of a text.
        dropout: rate on embeddings, attention output, both feed-forward layers and the classifier's
            input.
        attention_dropout: rate on attention weights; None: `dropout`. Only with 0 does training use
            attention without padding on a GPU, and a fused kernel on a CPU.
        token_dropout: probability that training drops a token's embedding, but not its position's
            (Iyyer et al., "Deep unordered composition rivals syntactic methods for text
            classification" (2015), section 3.1); the others are divided by 1 - token_dropout.
        pooling: the classifier's input: "cls", the first token, or "mean", over all tokens.
        mixup_at: where a plan mixes the texts: "sentence" or "embeddings", see the head of the
            file.
        pad: the token id of padding.
    """

    HEAD = "head"  # depends on the classes: re-initialized when the model is used for others
    BLOCKS = ("layers",)
    mixes_inside = True  # forward takes the mixing plan
    rounds_rows = True  # see `rows_for`; off while memory is measured (training/batch_probe.py)

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
            raise ValueError(f"layers must be at least 1, not {layers}")
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads: {dim} is not a multiple of {heads}")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {POOLINGS}, not {pooling!r}")
        if mixup_at not in MIXUP_PLACES:
            raise ValueError(f"mixup_at must be one of {MIXUP_PLACES}, not {mixup_at!r}")
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        for rate in (dropout, attention_dropout, token_dropout):
            if not 0 <= rate < 1:
                raise ValueError(f"dropout must be at least 0 and below 1, not {rate}")
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
            inputs: PackedTokens, or ids (n, length) int64, padded at the end with `pad`. A text's
                first token never counts as padding.
            mixing: None, or a plan with `apply` (n, ...) -> (n, ...), `partner` (n,) int64 and
                `lam` (n,) (see utils/mixup/mixing.py). At the embeddings, texts are zero beyond
                their end, and a text with weight 0 does not count towards the mixed length.
        """
        mix_embeddings = mixing is not None and self.mixup_at == "embeddings"
        if isinstance(inputs, Tensor):
            x, layout = self._embed_grid(inputs)
        else:
            x, layout = self._embed_packed(inputs, rounded=self.rounds_rows and not mix_embeddings)
        if mix_embeddings:
            x, layout = _mix_embeddings(x, layout, mixing)
        x, cls = self.dropout(x), self.pooling == "cls"
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            x = layer(x, layout, first_only=cls and last)
        x = self.norm(x)
        if not cls:
            x = layout.mean(x)  # (n, dim)
        x = layout.real(x)
        if mixing is not None and self.mixup_at == "sentence":
            x = mixing.apply(x)
        return self.head(self.dropout(x))

    def flags_for(self, tensors: dict[str, Tensor]) -> list[str] | None:
        """What to change so that the model has the shapes of `tensors`; None if no Transformer has
        them."""
        names = ("tokens.weight", "positions.weight", "layers.0.fc1.weight")
        if any(name not in tensors or tensors[name].ndim != 2 for name in names):
            return None
        theirs, ours = _sizes(tensors), _sizes(self.state_dict())
        changes = [f"--{name} {size}" for name, size in theirs.items() if size != ours[name]]
        if len(tensors["tokens.weight"]) != self.tokens.num_embeddings:
            also = "and " if changes else ""
            changes.append(f"{also}the tokenizer of these weights (--tokenizer)")
        return changes

    def _embed_packed(self, texts: PackedTokens, rounded: bool) -> tuple[Tensor, Layout]:
        self._check_length(texts.longest)
        ids, position = texts.ids, texts.place.remainder(texts.longest)
        rows = rows_for(ids.shape[0], ids.device) if rounded else ids.shape[0]
        if rows != ids.shape[0]:
            extra = (0, rows - ids.shape[0])
            ids, position = F.pad(ids, extra), F.pad(position, extra)
        return self.embed_tokens(ids) + self.positions(position), packed_layout(texts, rows)

    def _embed_grid(self, ids: Tensor) -> tuple[Tensor, Layout]:
        length = ids.shape[1]
        if not is_compiling():  # an exported graph has it as a range constraint
            self._check_length(length)
        x = self.embed_tokens(ids) + self.positions.weight[:length]  # (n, length, dim)
        lengths = (ids != self.pad).sum(1).clamp_min(1)
        return x.flatten(0, 1), grid_layout(lengths, length)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim): token embeddings, with token dropout in training."""
        x = self.tokens(ids)
        if not (self.training and self.token_dropout.rate):
            return x
        return x * self.token_dropout(x.new_ones(*ids.shape, 1))

    def _check_length(self, longest: int) -> None:
        if longest > self.max_len:
            raise ValueError(f"a text has {longest} tokens, but max_len is {self.max_len}")


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Flag -> size of the Transformer that has these tensors."""
    ffn, dim = tensors["layers.0.fc1.weight"].shape
    layers = sum(name.endswith(".fc1.weight") for name in tensors)
    max_len = len(tensors["positions.weight"])
    return {"layers": layers, "dim": dim, "ffn": ffn, "max_len": max_len}


def _mix_embeddings(x: Tensor, layout: Layout, mixing) -> tuple[Tensor, Layout]:
    """Mixes on the padded grid; a mixed text is as long as the longer of the two."""
    grid = layout.real(layout.zero_padding(layout.to_grid(x)))  # (n, longest, dim)
    lam, own = mixing.lam.detach(), layout.real(layout.lengths)
    lengths = torch.maximum(own * (lam > 0), own[mixing.partner] * (lam < 1))
    return mixing.apply(grid).flatten(0, 1), grid_layout(lengths, layout.longest)
