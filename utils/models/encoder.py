"""Classifiers of texts on encoders of Hugging Face's transformers.

Where the architecture allows it, nothing is computed for padding: the tokens of a batch are one
long row, and attention works per text, as in the Transformer here (transformer.py). A trial with
two texts decides it: where the row does not give what the padded batch gives, batches are padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.dropout import Dropout
from ..packed import PackedTokens
from .text_layout import Layout, grid_layout, packed_layout, rows_for
from .transformer import attend_rows

PACKED = "packed"  # the name of `_attend` in transformers
TOLERANCE = 1e-3  # largest difference in the trial, in float32


class Encoder(nn.Module):
    """Texts -> logits (n, classes), by a linear layer on the pooled output of an encoder.

    Args:
        backbone: a PreTrainedModel whose tokens attend in both directions, on the CPU.
        classes: number of logits.
        max_len: the most tokens of a text, without the one after it.
        pooling: the classifier's input: "cls", the first token, or "mean", over all tokens.
        dropout: rate on the classifier's input.
        pad: the token id of padding.
        end: the id of the token after each text; None: there is none.
    """

    HEAD = "head"  # depends on the classes: re-initialized when the model is used for others
    mixes_inside = True  # forward takes the mixing plan
    rounds_rows = True  # see `rows_for`; off while memory is measured (training/batch_probe.py)

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        *,
        max_len: int,
        pooling: str = "mean",
        dropout: float = 0.0,
        pad: int = 0,
        end: int | None = None,
    ):
        super().__init__()
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler = None  # for tasks of the library's own: nothing would train it
        self.backbone: Any = backbone
        self.max_len, self.pooling, self.pad, self.end = max_len, pooling, pad, end
        self.dropout = Dropout(dropout)
        self.head = _untrained_head(backbone.config.hidden_size, classes)
        lists = [(n, m) for n, m in self.named_modules() if isinstance(m, nn.ModuleList)]
        self.BLOCKS = (max(lists, key=lambda item: len(item[1]))[0],) if lists else ()
        self.first_position = self._find_first_position()

    def forward(self, inputs: PackedTokens | Tensor, mixing=None) -> Tensor:
        """Logits (n, classes).

        Args:
            inputs: PackedTokens, or ids (n, length) int64, padded at the end with `pad`. A text's
                first token never counts as padding.
            mixing: None, or a plan that mixes what the classifier reads (utils/mixup/mixing.py).
        """
        x = self.features(inputs)
        if mixing is not None:
            x = mixing.apply(x)
        return self.head(self.dropout(x))

    def features(self, inputs: PackedTokens | Tensor) -> Tensor:
        """(n, width): the pooled output of the encoder; `inputs` as in `forward`."""
        if isinstance(inputs, PackedTokens):
            texts = inputs if self.end is None else with_end(inputs, self.end)
            if self.first_position is None:
                lengths = texts.offsets.diff().long()[: texts.samples]
                return self._of_grid(texts.padded(self.pad), lengths)
            tokens = texts.ids.shape[0]
            rows = rows_for(tokens, texts.device) if self.rounds_rows else tokens
            ids, position = texts.ids, texts.place.remainder(texts.longest)
            if rows != tokens:
                ids, position = (F.pad(part, (0, rows - tokens)) for part in (ids, position))
            return self._of_rows(ids, position, packed_layout(texts, rows))
        ids, lengths = inputs, (inputs != self.pad).sum(1).clamp_min(1)
        if self.end is not None:
            ids = F.pad(ids, (0, 1), value=self.pad).scatter(1, lengths[:, None], self.end)
            lengths = lengths + 1
        if self.first_position is None:
            return self._of_grid(ids, lengths)
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self._of_rows(ids.flatten(), position.flatten(), grid_layout(lengths, ids.shape[1]))

    def _of_rows(self, ids: Tensor, position: Tensor, layout: Layout) -> Tensor:
        """(n, width), of tokens (rows,)."""
        position = position + self.first_position
        x = self.backbone(input_ids=ids[None], position_ids=position[None], layout=layout)
        return self._pooled(x.last_hidden_state[0], layout)

    def _of_grid(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(n, width), of tokens (n, longest)."""
        layout = grid_layout(lengths, ids.shape[1])
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.backbone(input_ids=ids, attention_mask=mask.long())
        return self._pooled(x.last_hidden_state.flatten(0, 1), layout)

    def _pooled(self, rows: Tensor, layout: Layout) -> Tensor:
        return layout.real(layout.first(rows) if self.pooling == "cls" else layout.mean(rows))

    def convert_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights without adapters, as a model with them has them; the adapters start anew."""
        own = self.state_dict()
        adapters = {name: tensor for name, tensor in own.items() if "lora_" in name}
        if not adapters or adapters.keys() & tensors.keys():
            return tensors
        inner = {name.replace(".base_layer.", "."): name for name in own}
        return adapters | {inner.get(name, name): tensor for name, tensor in tensors.items()}

    def flags_for(self, tensors: dict[str, Tensor]) -> list[str]:
        """What to change so that the model has the shapes of `tensors`, if these have adapters."""
        ranks = {len(tensor) for name, tensor in tensors.items() if ".lora_A." in name}
        return [f"--lora {rank}" for rank in sorted(ranks)]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Raises AttributeError if the encoder has none."""
        if not getattr(self.backbone, "supports_gradient_checkpointing", False):
            raise AttributeError("gradient checkpointing")
        self.backbone.config.use_cache = False  # else there is a warning
        word, own = "enable" if enable else "disable", self.backbone
        # Its older name until transformers 5.
        switch = getattr(own, f"activation_checkpointing_{word}", None)
        switch = switch or getattr(own, f"gradient_checkpointing_{word}")
        switch(*[{"use_reentrant": False}] * enable)

    def _find_first_position(self) -> int | None:
        """The position of a text's first token with which rows of texts give what padded batches
        give; None: they do not."""
        config, kept = self.backbone.config, self.backbone.config._attn_implementation
        window = (getattr(config, "sliding_window", None) or 0) + 3  # a text that does not fit in
        long = min(self.max_len + (self.end is not None), max(8, window))
        lengths = torch.tensor([3, long])
        ids = (torch.arange(2 * long) % 5 + config.vocab_size // 2).view(2, long)
        ids = ids.where(torch.arange(long) < lengths[:, None], self.pad)
        position, layout = torch.arange(long).repeat(2), grid_layout(lengths, long)
        trained = self.backbone.training
        self.backbone.eval()
        self.first_position = None
        with torch.no_grad():
            expected = self._of_grid(ids, lengths)
        try:
            with torch.no_grad():
                _register()
                config._attn_implementation = PACKED
                for first in (0, self.pad + 1):  # RoBERTa's begin after the padding's
                    self.first_position = first
                    found = self._of_rows(ids.flatten(), position, layout)
                    if torch.allclose(found, expected, atol=TOLERANCE):
                        return first
        except Exception:  # whatever its code does with arguments that it does not know
            pass
        finally:
            self.backbone.train(trained)
        config._attn_implementation = kept
        return None


class StaticEmbeddings(nn.Module):
    """The tables of Model2Vec: an embedding of each token, and possibly which row a token has
    (`mapping`) and how much it counts (`weights`); shapes as given."""

    def __init__(self, embeddings, mapping=None, weights=None, normalize: bool = True):
        super().__init__()
        self.normalize = normalize
        self.embeddings = nn.Parameter(torch.randn(*embeddings))
        self.weights = None if weights is None else nn.Parameter(torch.ones(*weights))
        rows = None if mapping is None else torch.zeros(*mapping, dtype=torch.long)
        self.register_buffer("mapping", rows)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., width)."""
        x = F.embedding(ids if self.mapping is None else self.mapping[ids], self.embeddings)
        return x if self.weights is None else x * self.weights[ids][..., None]


class StaticEncoder(nn.Module):
    """Texts -> logits (n, classes), from the mean of the embeddings of their tokens, but for the
    first one, which the table does not have, and unknown ones.

    Args:
        dropout: rate on the classifier's input.
        pad, unknown: token ids.
    """

    HEAD, mixes_inside, BLOCKS = "head", True, ()
    forward = Encoder.forward

    def __init__(
        self,
        backbone: StaticEmbeddings,
        classes: int,
        dropout: float,
        pad: int,
        unknown: int | None,
    ):
        super().__init__()
        self.backbone, self.pad, self.unknown = backbone, pad, unknown
        self.dropout = Dropout(dropout)
        self.head = _untrained_head(backbone.embeddings.shape[1], classes)

    def features(self, inputs: PackedTokens | Tensor) -> Tensor:
        """(n, width); `inputs` as in `Encoder.forward`."""
        grid = inputs.padded(self.pad) if isinstance(inputs, PackedTokens) else inputs
        ids = grid[:, 1:]
        known = (ids != self.pad) & (ids != (-1 if self.unknown is None else self.unknown))
        x = self.backbone(torch.where(known, ids, 0)) * known[..., None]
        x = x.sum(1) / known.sum(1, keepdim=True).clamp_min(1)
        return F.normalize(x, eps=1e-6) if self.backbone.normalize else x


def _untrained_head(width: int, classes: int) -> nn.Linear:
    """All zeros: of a few texts noise in it would be a good part of what is learned."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def with_end(texts: PackedTokens, end: int) -> PackedTokens:
    """The texts, with the token `end` after each of them."""
    n, longest = texts.samples + texts.fillers, texts.longest + 1
    sample = texts.place // texts.longest  # of each token
    last = texts.offsets[1:].long() + torch.arange(n, device=texts.device)  # rows of end tokens
    row = torch.arange(len(texts.ids), device=texts.device) + sample
    ids = torch.full((len(texts.ids) + n,), end, device=texts.device).index_copy(0, row, texts.ids)
    place = torch.empty_like(ids).index_copy(0, row, texts.place + sample)
    lengths = texts.offsets.diff().long()
    place = place.index_copy(0, last, torch.arange(n, device=texts.device) * longest + lengths)
    offsets = texts.offsets + torch.arange(n + 1, device=texts.device, dtype=torch.int32)
    borders = None if texts.borders is None else texts.borders + np.arange(n + 1)
    return PackedTokens(ids, place, offsets, longest, borders, texts.fillers)


def add_adapters(model: Encoder, rank: int) -> None:
    """Trains, instead of the encoder's matrices, products of two narrow ones beside them (LoRA: Hu
    et al., "LoRA: low-rank adaptation of large language models" (2021), arXiv:2106.09685), by the
    peft library."""
    from peft import LoraConfig, inject_adapter_in_model

    model.backbone.requires_grad_(False)
    options = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    inject_adapter_in_model(options, model.backbone)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _attend)


def _attend(module, query, key, value, attention_mask, layout=None, **options):
    """Attention as transformers calls it: (1, heads, rows, width of a head) each -> ((1, rows,
    heads, width), None)."""
    heads = query.shape[1]
    q, k, v = (part[0].transpose(0, 1).flatten(1) for part in (query, key, value))
    window = options.get("sliding_window")
    out = attend_rows(
        q, k, v, layout, heads, options.get("dropout", 0.0),
        window=None if window is None else window - 1,
    )  # fmt: skip
    return out.unflatten(1, (heads, -1))[None], None
