#!/usr/bin/env python3
"""Trains a Transformer on texts: by default on AG News.

python transformer_test.py
python transformer_test.py --dataset csv --train_file mine.csv --test_fraction 0.1
python transformer_test.py --resume
python transformer_test.py --resume runs/my_run --predict new_texts.csv
"""

from dataclasses import dataclass

from utils.entry import Entry, end_process
from utils.errors import UserError
from utils.setting import setting
from utils.settings import TextSettings

MODEL = "model"  # heading in --help


@dataclass
class Settings(TextSettings):
    """The settings of this entry: those of every run on texts, and those of a Transformer."""

    entry = "transformer_test.py"
    of_backbone = ("dropout", "attention_dropout", "token_dropout")

    layers: int = setting(6, "Layers of the encoder", group=MODEL, low=1)
    dim: int = setting(
        512, "Width of a token's representation; a multiple of --heads", group=MODEL, low=1
    )
    heads: int = setting(8, "Attention heads", group=MODEL, low=1)
    ffn: int = setting(1024, "Width of the feed-forward layer", group=MODEL, low=1)
    dropout: float = setting(
        0.1,
        "Dropout on embeddings, attention output, both feed-forward layers, classifier input",
        group=MODEL,
        low=0,
        below=1,
    )
    attention_dropout: float = setting(
        0.0,
        "Dropout on attention weights; above 0 training is slower", group=MODEL, low=0,
        below=1,
    )  # fmt: skip
    token_dropout: float = setting(
        0.0,
        "Fraction of a text's tokens left out in training, at random in each epoch",
        group=MODEL, low=0, below=1,
    )  # fmt: skip
    pooling: str = setting(
        "cls", "What the classifier reads: the first token of a text, or the mean of all",
        group=MODEL, choices=("cls", "mean"),
    )  # fmt: skip

    def validate(self):
        super().validate()
        if self.dim % self.heads:
            raise UserError(
                f"--dim {self.dim} is not a multiple of --heads {self.heads}: each head gets "
                "an equal part"
            )


def build_model(settings: Settings, card):
    """The Transformer for the tokens and classes of `card` (a TextCard), on the CPU."""
    from utils.data.texts.tokenizer import pad_id, tokenizer_from_json, vocabulary_size
    from utils.models.transformer import Transformer

    tokenizer = tokenizer_from_json(card.tokenizer)
    return Transformer(
        vocabulary_size(tokenizer),
        len(card.classes),
        layers=settings.layers,
        dim=settings.dim,
        heads=settings.heads,
        ffn=settings.ffn,
        max_len=card.max_len,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        token_dropout=settings.token_dropout,
        pooling=settings.pooling,
        mixup_at=settings.mixup_at,
        pad=pad_id(tokenizer),
    )


def model_name(settings: Settings) -> str:
    return f"transformer{settings.layers}x{settings.dim}"


ENTRY = Entry(Settings, build_model, model_name, __doc__)
main = ENTRY.main

if __name__ == "__main__":
    end_process(main())
