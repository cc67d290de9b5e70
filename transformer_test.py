#!/usr/bin/env python3
"""Trains a Transformer, or an encoder of Hugging Face's hub, on texts: by default on AG News.

python transformer_test.py
python transformer_test.py --model sentence-transformers/all-MiniLM-L6-v2 --pretrained
python transformer_test.py --dataset csv --train_file mine.csv --test_fraction 0.1
python transformer_test.py --resume
python transformer_test.py --resume runs/my_run --predict new_texts.csv
"""

from dataclasses import dataclass
from pathlib import Path

from utils.entry import Entry, end_process
from utils.errors import UserError
from utils.machine.packages import require
from utils.setting import setting
from utils.settings import TextSettings
from utils.settings.texts import OWN
from utils.settings.transfer import is_published

MODEL = "model"  # heading in --help
SIZES = ("layers", "dim", "heads", "ffn", "token_dropout")
# What encoders are trained with, unless something else is given: all of it, or the head alone
# (benchmarks/results/encoders.md).
USUAL = {"optimizer": "adamw", "batch_size": 32, "weight_decay": 0.01, "sched": "cosine"}
FINE_TUNING = USUAL | {"epochs": 3, "lr": 5e-5, "head_lr": 1e-3, "warmup_ratio": 0.1}
HEAD_ALONE = USUAL | {"epochs": 20, "lr": 3e-3, "weight_decay": 0.5}
ADAPTERS = FINE_TUNING | {"lr": 5e-4}


@dataclass
class Settings(TextSettings):
    """The settings of this entry: those of every run on texts, and those of a Transformer."""

    entry = "transformer_test.py"
    of_backbone = ("dropout", "attention_dropout", "token_dropout")

    model: str = setting(
        OWN,
        "transformer, with the sizes below; or an encoder of Hugging Face's transformers: its name "
        "on the hub, as owner/name or owner/name@revision, or its folder",
        group=MODEL,
    )
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
    pooling: str | None = setting(
        None, "What the classifier reads: the first token of a text, or the mean of all",
        group=MODEL, choices=("cls", "mean"),
        default_text="cls; of an encoder, as it says of itself, else mean",
    )  # fmt: skip
    lora: int | None = setting(
        None,
        "Train, instead of the encoder's matrices, adapters of this rank beside them (LoRA)",
        group=MODEL, low=1,
    )  # fmt: skip
    grad_checkpointing: bool = setting(
        False,
        "Keep no activations inside the layers of an encoder, and compute them again in the "
        "backward pass: less memory, a third more time",
        group=MODEL, resume="free",
    )  # fmt: skip

    @property
    def encoder(self) -> str | None:  # type: ignore[override]  # only read
        return None if self.model == OWN else self.model

    @classmethod
    def implied(cls, given, say):
        implied = super().implied(given, say)
        if given.get("model", OWN) == OWN or not is_published(given.get("pretrained")):
            return implied
        usual = ADAPTERS if given.get("lora") else FINE_TUNING
        if given.get("freeze_backbone") and not given.get("unfreeze_epoch"):
            usual = HEAD_ALONE
        if given.get("ngd") or given.get("optimizer", "adamw") != "adamw":
            usual = {"epochs": usual["epochs"], "batch_size": usual["batch_size"]}
            if "lr" not in given and usual["epochs"] == FINE_TUNING["epochs"]:
                say("note: the optimizer's default rate is for training from nothing: give --lr")
        implied |= {name: value for name, value in usual.items() if name not in given}
        words = " ".join(f"--{name} {value}" for name, value in implied.items())
        say(f"note: usual for pretrained encoders: {words}")
        return implied

    def ineffective(self):
        yield from super().ineffective()
        if self.encoder is not None:
            yield SIZES, f"--model {self.model} has its own sizes", "model"
        else:
            yield ("lora", "grad_checkpointing"), "it is for --model NAME|FOLDER", "model"

    def validate(self):
        super().validate()
        if self.encoder is None:
            self.pooling = self.pooling or "cls"
        elif self.mixup_at == "embeddings":
            raise UserError("--mixup_at embeddings is for --model transformer; leave it out")
        if self.lora and self.action.trains:
            require("--lora", "peft")
        if self.lora and self.freeze_backbone:
            raise UserError(
                "--lora already keeps the encoder's weights: leave --freeze_backbone out"
            )
        if self.dim % self.heads:
            raise UserError(
                f"--dim {self.dim} is not a multiple of --heads {self.heads}: each head gets "
                "an equal part"
            )


def build_model(settings: Settings, card):
    """The model for the tokens and classes of `card` (a TextCard), on the CPU."""
    from utils.data.texts.tokenizer import pad_id, tokenizer_from_json, vocabulary_size
    from utils.models.named import checkpoint_gradients
    from utils.models.transformer import Transformer

    if card.encoder is not None:
        from utils.weights.encoders import build_encoder

        model = build_encoder(
            card, dropout=settings.dropout, attention_dropout=settings.attention_dropout,
            lora=settings.lora,
        )  # fmt: skip
        if settings.grad_checkpointing:
            checkpoint_gradients(model, settings.model)
        return model
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
        pooling=settings.pooling or "cls",
        mixup_at=settings.mixup_at,
        pad=pad_id(tokenizer),
    )


def check_model(settings: Settings) -> None:
    """UserError if the weights are an encoder's, and the model is none."""
    from utils.weights.pretrained import hub_folder

    source = settings.pretrained
    if settings.encoder is None and source and Path(source).is_dir() and hub_folder(Path(source)):
        raise UserError(
            f"--pretrained {source}: this is an encoder: give --model {source} --pretrained"
        )


def model_name(settings: Settings) -> str:
    if settings.encoder is not None:
        return Path(settings.encoder.partition("@")[0]).resolve().name.lower()
    return f"transformer{settings.layers}x{settings.dim}"


ENTRY = Entry(Settings, build_model, model_name, __doc__, check_model)
main = ENTRY.main

if __name__ == "__main__":
    end_process(main())
