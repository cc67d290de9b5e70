#!/usr/bin/env python3
"""Trains a Transformer on texts: by default on AG News.

python transformer_test.py
python transformer_test.py --dataset csv --train_file mine.csv --test_fraction 0.1
python transformer_test.py --resume
python transformer_test.py --resume runs/my_run --predict new_texts.csv
"""

import os
from dataclasses import dataclass

from utils.entry import end_process, run_entry
from utils.errors import UserError
from utils.runs.run import Run
from utils.setting import setting
from utils.settings import TextSettings
from utils.settings.config import DEFAULT

MODEL = "model"  # heading in --help


@dataclass
class Settings(TextSettings):
    """The settings of this entry: those of every run on texts, and those of a Transformer."""

    entry = "transformer_test.py"

    layers: int = setting(6, "Layers of the encoder", group=MODEL, low=1)
    dim: int = setting(
        512, "Width of a token's representation, a multiple of --heads", group=MODEL, low=1
    )
    heads: int = setting(8, "Heads of attention", group=MODEL, low=1)
    ffn: int = setting(1024, "Width of the hidden layer after attention", group=MODEL, low=1)
    dropout: float = setting(
        0.1,
        "Dropout of embeddings, of the output of attention and of the layer after it, of what is "
        "hidden in that and of what the classifier reads",
        group=MODEL,
        low=0,
        below=1,
    )
    attention_dropout: float = setting(
        0.0, "Dropout of the weights of attention; above 0 it is slower", group=MODEL, low=0,
        below=1,
    )  # fmt: skip
    token_dropout: float = setting(
        0.0, "Share of the tokens that a text is trained without, others in every epoch",
        group=MODEL, low=0, below=1,
    )  # fmt: skip
    pooling: str = setting(
        "cls", "What the classifier reads: the first token of a text, or the mean of all",
        group=MODEL, choices=("cls", "mean"),
    )  # fmt: skip

    def check(self):
        super().check()
        if self.dim % self.heads:
            raise UserError(
                f"--dim {self.dim} is no multiple of --heads {self.heads}: each head takes an "
                "equal part of it"
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


def check_belongs(settings: Settings, origin: dict, card) -> None:
    """UserError for a setting that weights trained with `card` (a TextCard) do not fit."""
    for name in ("tokenizer", "vocab_size", "lowercase"):
        if origin[name] != DEFAULT:
            raise UserError(
                f"--{name} has no effect: the weights of {settings.pretrained} belong to "
                "their own tokenizer"
            )
    for name in ("heads", "pooling"):
        theirs = getattr(card, name)
        if theirs not in (None, getattr(settings, name)):
            raise UserError(
                f"--pretrained {settings.pretrained}: its weights were trained with --{name} "
                f"{theirs}; give that too"
            )


def train(settings: Settings, origin: dict, signals) -> None:
    model_name = f"transformer{settings.layers}x{settings.dim}"
    with Run(settings, origin, signals, model_name, settings.dataset) as run:
        # oneDNN keeps what it compiles for each shape of a product in half precision, and batches
        # of texts have thousands of shapes: gigabytes. It reads this at its first one.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        # PyTorch takes seconds: --help and wrong flags have answered before.
        from utils.inference.use_model import predict_rows, text_card, use_model
        from utils.runs.train_classifier import train_classifier
        from utils.tasks.texts import load_text_task
        from utils.weights.pretrained import load_pretrained

        checkpoint = run.load_checkpoint()
        card = text_card(checkpoint) if checkpoint else None
        if settings.predict or settings.export:
            model = build_model(settings, card).to(run.device)
            use_model(run, model, checkpoint, card, predict_rows)
            return

        pretrained = None
        if settings.pretrained and checkpoint is None:
            pretrained = load_pretrained(settings.pretrained, model_name, run.console.say)
            run.console.say(f"weights from {pretrained.source_text}")
            card = pretrained.texts
            if card is not None:
                check_belongs(settings, origin, card)
        tokenizer = None  # that of the settings; weights from elsewhere belong to their own
        if settings.pretrained or not settings.tokenizer_is_trained:
            tokenizer = card and card.tokenizer
        task = load_text_task(
            settings, run.device, run.console, tokenizer, run.exchange, run.micro_batches
        )
        run.check_data(checkpoint, task.data.fingerprint)

        model = build_model(settings, task.card)
        train_classifier(run, model, task, checkpoint, pretrained)


def main(argv: list[str] | None = None) -> int:
    return run_entry(Settings, train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    end_process(main())
