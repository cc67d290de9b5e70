"""The task of texts, with its loaders. Its data are in text_data.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..data.texts.equal_tokens import EqualTokensLoader
from ..data.texts.loader import TextLoader
from ..data.texts.published_csv import line_end_of
from ..data.texts.rows import column_names
from ..data.texts.token_store import TokenizedData, TokenSplit
from ..errors import UserError
from ..exchange import Exchange
from ..local.workers import Workers
from ..reporting.console import Console
from ..settings import TextSettings
from ..settings.config import COMMAND_LINE, DEFAULT, FILE
from ..settings.texts import OWN
from ..weights.card import TextCard
from ..weights.encoders import read_encoder
from ..weights.pretrained import Pretrained
from .kinds import Kind
from .mixing import auto_split, build_mixing
from .sample_names import text_names
from .simple_models import WordModel
from .task import Task, counts_text
from .text_data import load_texts, read_table


@dataclass(frozen=True)
class TextTask(Task):
    """A data set of texts, with its loaders."""

    SKIPPED = "skipped_rows"
    learns_from_all_pairs = True  # the model mixes texts, and needs the partners

    train: TextLoader

    def further_entries(self) -> dict:
        return {"vocabulary": self.data.vocab_size}

    def usual_sample(self) -> torch.Tensor:
        """(1, tokens) int64: a text of the mean length."""
        length = max(1, round(float(self.train.lengths.mean())))
        return torch.full((1, length), self.data.cls_id)


def load_text_task(
    settings: TextSettings,
    device: torch.device,
    console: Console,
    tokenizer: str | None = None,
    exchange: Exchange | None = None,
    workers: Workers | None = None,
    micro_batches: int | None = None,
    encoder: dict | None = None,
) -> TextTask:
    """Loads the data set, splits and encodes it and makes the loaders, all as `settings` say.

    Args:
        tokenizer: JSON of the tokenizer that the weights were trained with; None: the settings name
            it.
        exchange: with the other ranks; None: a single process.
        workers: among whom training steps are divided; None: the ranks.
        micro_batches: of all workers in an optimizer step; None: as the settings say.
        encoder: that of the card; None: the model is the Transformer here.
    """
    exchange = exchange or Exchange()
    workers = workers or Workers.divide(exchange.size, exchange.rank, exchange.size)
    data = load_texts(settings, console, exchange, tokenizer)
    card = TextCard(
        tuple(data.classes),
        data.tokenizer_json,
        settings.clean_text,
        settings.max_len,
        settings.heads if encoder is None else None,
        settings.pooling or (encoder or {}).get("pooling"),
        line_end_of(settings.dataset),
        encoder,
    )
    task = _make_loaders(settings, data, card, device, console, exchange, workers, micro_batches)
    console.say(
        f"{data.name}: {counts_text('texts', data.train, data.val, data.test)} of "
        f"{len(data.classes)} classes from {data.source}; {data.train.lengths.mean():.0f} tokens "
        f"each on average, vocabulary {data.vocab_size:,}"
    )
    return task


def _make_loaders(
    settings: TextSettings,
    data: TokenizedData,
    card: TextCard,
    device: torch.device,
    console: Console,
    exchange: Exchange,
    workers: Workers,
    micro_batches: int | None,
) -> TextTask:
    """The task with loaders of these splits, as the settings say; see `load_text_task`."""
    auto = auto_split(settings, data.train.labels)
    loader_class: type[TextLoader] = TextLoader
    step: dict = {"step_size": settings.global_batch}
    if settings.batch_tokens is not None:
        loader_class = EqualTokensLoader
        step = {"batch_tokens": settings.batch_tokens, "micro_batches": micro_batches}
    train = _loader(
        data.train,
        settings,
        device,
        exchange,
        loader_class,
        **step,
        rank=workers.own[0],
        ranks=workers.size,
        accumulation=settings.accumulation_steps,
        shuffle=True,
        seed=settings.seed,
        mixing=build_mixing(
            settings,
            strength=None if auto is None else auto.strength,
            workers=workers.size,
            say=console.say,
        ),
        hold_out=auto and auto.hold_out,
        by_class=settings.class_sampler == "balanced",
    )
    test = _loader(data.test, settings, device, exchange)
    val = None if data.val is None else _loader(data.val, settings, device, exchange)
    held_out, trained = None, None
    if auto is not None:
        held_out, trained = (
            _loader(data.train, settings, device, exchange, rows=rows)
            for rows in (auto.held_out, auto.trained)
        )
    names = {
        name: text_names(
            split,
            data.tokenizer_json,
            data.files.get(name, data.files.get("train")),
            column_names(settings.id_columns) or (),
            settings.encoding,
        )
        for name, split in data.splits.items()
    }
    simple = WordModel(data, settings)
    return TextTask(data, card, train, test, val, auto, held_out, trained, names, simple)


def _loader(
    split: TokenSplit,
    settings: TextSettings,
    device: torch.device,
    exchange: Exchange,
    loader_class: type[TextLoader] = TextLoader,
    **options,
) -> TextLoader:
    ranks = {"rank": exchange.rank, "ranks": exchange.size}
    return loader_class(
        split.tokens, split.offsets, split.labels, batch_size=settings.batch_size, device=device,
        max_len=settings.max_len, **ranks | options,
    )  # fmt: skip


class Texts(Kind):
    """The kind of task whose samples are texts. Weights keep the tokenizer that they were trained
    with."""

    card_class = TextCard
    data_flags = "--data_dir, --train_file, --test_file, --text_columns, --labels"
    # oneDNN caches compiled code for each shape of a matrix product in half precision, and batches
    # of texts have thousands of shapes: gigabytes. It reads this variable at its first product.
    environment: ClassVar[dict[str, str]] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}

    def load_published(self, say):
        if self.settings.encoder is None:
            return super().load_published(say)
        files = read_encoder(self.settings.encoder, say)
        return Pretrained(files.weights, files.source, encoder=files)

    def load_task(self, run, card, pretrained) -> TextTask:
        settings = self.settings
        if settings.eval_data is not None:
            split, data = read_table(Path(settings.eval_data), settings, card, run.console.say)
            test = _loader(split, settings, run.device, run.exchange)
            ids = column_names(settings.id_columns) or ()
            path = Path(settings.eval_data)
            names = text_names(split, card.tokenizer, path, ids, settings.encoding)
            return TextTask(data, card, test, test, None, names={"test": names})
        if pretrained is not None and pretrained.card is not None:
            card = pretrained.card
            check_belongs(settings, run.origin, card)
        elif pretrained is not None and settings.tokenizer_is_trained and settings.encoder is None:
            run.console.say(
                f"note: {pretrained.source_text} comes without a tokenizer: give the one that it "
                "was trained with by --tokenizer"
            )
        tokenizer = encoder = None  # as the settings say
        if card is not None:
            encoder = card.encoder
            if settings.pretrained or not settings.tokenizer_is_trained:
                tokenizer = card.tokenizer
        elif settings.encoder is not None:
            files = pretrained and pretrained.encoder
            files = files or read_encoder(settings.encoder, run.console.say)
            tokenizer, encoder = files.tokenizer, files.card
        return load_text_task(
            settings,
            run.device,
            run.console,
            tokenizer,
            run.exchange,
            run.workers,
            run.micro_batches,
            encoder,
        )


def check_belongs(settings, origin: dict, card: TextCard) -> None:
    """UserError if a setting contradicts `card`, with which the weights were trained. A recipe's
    tokenizer gives way to weights that the command line names."""
    gives_way = {DEFAULT, FILE} if origin["pretrained"] == COMMAND_LINE else {DEFAULT}
    for name in ("tokenizer", "vocab_size", "lowercase", "min_freq", "vocab", "stopwords"):
        if origin[name] not in gives_way:
            raise UserError(
                f"--{name} has no effect: the weights of {settings.pretrained} belong to "
                "their own tokenizer"
            )
    if (card.encoder is None) != (settings.encoder is None):
        model = OWN if card.encoder is None else card.encoder["source"].partition("@")[0]
        raise UserError(
            f"--pretrained {settings.pretrained}: its weights are of --model {model}; give that too"
        )
    for name in ("heads", "pooling"):
        theirs = getattr(card, name)
        if theirs is not None and getattr(settings, name) not in (None, theirs):
            raise UserError(
                f"--pretrained {settings.pretrained}: its weights were trained with --{name} "
                f"{theirs}; give that too"
            )
    if card.clean != settings.clean_text and not settings.action.trains:
        flag = "--clean_text" if card.clean else "--no_clean_text"
        raise UserError(
            f"--pretrained {settings.pretrained}: its weights were trained with {flag}; give that "
            "too"
        )
