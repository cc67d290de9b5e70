"""The task of texts: from settings to tokens and loaders."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch

from ..data.class_names import names_notes
from ..data.texts.cache import load_tokenized
from ..data.texts.csv_texts import CLASS_NAMES, class_names, notes_of, read_files, to_texts
from ..data.texts.loader import TextLoader
from ..data.texts.published_csv import PUBLISHED, line_end_of
from ..data.texts.rows import column_names, read_samples, whole_number
from ..data.texts.sources import TextRequest
from ..data.texts.token_store import (
    TokenizedData,
    TokenSplit,
    content_fingerprint,
    lines_on_losses,
)
from ..data.texts.tokenizer import encode, tokenizer_from_json
from ..data.texts.tokenizer_request import TokenizerRequest
from ..errors import UserError
from ..exchange import Exchange
from ..local.workers import Workers
from ..plural import counted
from ..reporting.console import Console
from ..settings import TextSettings
from ..settings.config import COMMAND_LINE, DEFAULT, FILE
from ..weights.card import TextCard
from .kinds import Kind
from .mixing import auto_split, build_mixing
from .task import Task, counts_text


@dataclass(frozen=True)
class TextTask(Task):
    """A data set of texts, with its loaders."""

    SKIPPED = "skipped_rows"
    train: TextLoader

    def further_entries(self) -> dict:
        return {"vocabulary": self.data.vocab_size}

    def usual_sample(self) -> torch.Tensor:
        """(1, tokens) int64: a text of the mean length."""
        return torch.ones(1, round(float(self.train.lengths.mean())), dtype=torch.long)


def load_text_task(
    settings: TextSettings,
    device: torch.device,
    console: Console,
    tokenizer: str | None = None,
    exchange: Exchange | None = None,
    workers: Workers | None = None,
    micro_batches: int | None = None,
) -> TextTask:
    """Loads, splits and encodes the texts that the settings name.

    Args:
        tokenizer: JSON of the tokenizer that the weights were trained with; None: the settings name
            it.
        exchange: with the other ranks; None: a single process.
        workers: among whom training steps are divided; None: the ranks.
        micro_batches: of all workers in an optimizer step; None: as the settings say.
    """
    exchange = exchange or Exchange()
    workers = workers or Workers.divide(exchange.size, exchange.rank, exchange.size)
    with exchange.in_turn():  # one rank downloads and encodes, the others memory-map its files
        data = _load_data(settings, tokenizer)
    encoded = {name: [split] for name, split in data.splits.items()}
    resumed = settings.resume is not None
    losses = lines_on_losses(encoded, data.tokenizer_json, settings.max_len, trained=resumed)
    for note in data.notes + losses:
        console.say(note)
    for note in names_notes(data.classes):
        console.say(f"note: {note}")
    card = TextCard(
        tuple(data.classes),
        data.tokenizer_json,
        settings.clean_text,
        settings.max_len,
        settings.heads,
        settings.pooling,
        line_end_of(settings.dataset),
    )
    auto = auto_split(settings, data.train.labels)
    train = _loader(
        data.train,
        settings,
        device,
        exchange,
        rank=workers.own[0],
        ranks=workers.size,
        shuffle=True,
        seed=settings.seed,
        accumulation=settings.accumulation_steps,
        step_size=settings.global_batch,
        micro_batches=micro_batches,
        batch_tokens=settings.batch_tokens,
        mixing=build_mixing(
            settings,
            strength=None if auto is None else auto.strength,
            workers=workers.size,
            say=console.say,
        ),
        hold_out=auto and auto.hold_out,
    )
    test = _loader(data.test, settings, device, exchange)
    val = None if data.val is None else _loader(data.val, settings, device, exchange)
    console.say(
        f"{data.name}: {counts_text('texts', data.train, data.val, data.test)} of "
        f"{len(data.classes)} classes from {data.source}; {data.train.lengths.mean():.0f} tokens "
        f"each on average, vocabulary {data.vocab_size:,}"
    )
    held_out, trained = None, None
    if auto is not None:
        held_out, trained = (
            _loader(data.train, settings, device, exchange, rows=rows)
            for rows in (auto.held_out, auto.trained)
        )
    return TextTask(data, card, train, test, val, auto, held_out, trained)


def _load_data(settings: TextSettings, tokenizer: str | None) -> TokenizedData:
    return load_tokenized(
        settings.dataset,
        text_request(settings),
        TokenizerRequest(
            settings.tokenizer,
            settings.vocab_size,
            settings.lowercase,
            tokenizer,
            settings.min_freq,
            None if settings.vocab is None else Path(settings.vocab),
        ),
        cache_dir=settings.cache_dir,
        val_fraction=settings.val_fraction,
        subset=settings.subset,
        seed=settings.seed,
    )


def text_request(settings: TextSettings) -> TextRequest:
    """Which files, columns and rows the settings ask for."""

    def path(name: str | None) -> Path | None:
        return None if name is None else Path(name)

    return TextRequest(
        data_dir=Path(settings.data_dir),
        train_file=path(settings.train_file),
        test_file=path(settings.test_file),
        val_file=path(settings.val_file),
        text_columns=tuple(column_names(settings.text_columns) or ()),
        label_column=settings.label_column,
        on_bad=settings.on_bad,
        clean=settings.clean_text,
        encoding=settings.encoding,
        header=settings.header,
        max_bad=settings.max_bad,
        group_column=settings.group_column,
        divided=bool(settings.val_fraction) or settings.test_file is None,
        # A recipe's gives way to a test file.
        test_fraction=None if settings.test_file else settings.test_fraction,
    )


def _loader(
    split: TokenSplit, settings: TextSettings, device: torch.device, exchange: Exchange, **options
):
    ranks = {"rank": exchange.rank, "ranks": exchange.size}
    return TextLoader(
        split.tokens, split.offsets, split.labels, batch_size=settings.batch_size, device=device,
        max_len=settings.max_len, **ranks | options,
    )  # fmt: skip


def _load_all_of(path: Path, run, card: TextCard) -> TextTask:
    """All texts of a table, for the trained model whose card this is."""
    settings, say, classes = run.settings, run.console.say, list(card.classes)
    request = text_request(settings)
    written = _as_written(path, settings.dataset, classes, request)
    samples = read_files(request, {"test": path}, tuple(written), card.line_end)
    texts = to_texts(samples["test"], written)
    tokens, offsets = encode(tokenizer_from_json(card.tokenizer), texts.texts)
    split = TokenSplit(tokens, offsets, texts.labels)
    losses = lines_on_losses({"test": [split]}, card.tokenizer, card.max_len, trained=True)
    for note in notes_of(samples) + losses:
        say(note)
    say(f"{counted(len(texts), 'text')} of {len(classes)} classes from {path}")
    fingerprint = content_fingerprint(classes, card.tokenizer, {"test": split})
    data = SimpleNamespace(classes=classes, fingerprint=fingerprint)
    test = _loader(split, settings, run.device, run.exchange)
    return TextTask(data, card, test, test, None)


def _as_written(path: Path, dataset: str, classes: list[str], request: TextRequest) -> list[str]:
    """The classes as the table at `path` has them: as numbers if it is one of the published files,
    or if a file beside it names them."""
    published = dataset in PUBLISHED
    if not published and not (path.parent / CLASS_NAMES).is_file():
        return classes
    any_row = replace(request, on_bad="skip", max_bad=1.0)
    labels = {whole_number(label) for label in read_samples(path, any_row).labels}
    if None in labels:
        return classes
    if published:
        return [str(number) for number in range(1, len(classes) + 1)]
    numbers = sorted(labels, key=int)
    number_of = dict(zip(class_names(path, numbers, request.encoding)[0], numbers, strict=True))
    return [number_of.get(name, name) for name in classes]


class Texts(Kind):
    """The kind of task whose samples are texts. Weights keep the tokenizer that they were trained
    with."""

    card_class = TextCard
    data_flags = "--data_dir, --train_file, --test_file, --text_columns"
    # oneDNN caches compiled code for each shape of a matrix product in half precision, and batches
    # of texts have thousands of shapes: gigabytes. It reads this variable at its first product.
    environment: ClassVar[dict[str, str]] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}

    def load_task(self, run, card, pretrained) -> TextTask:
        settings = self.settings
        if settings.eval_data is not None:
            return _load_all_of(Path(settings.eval_data), run, card)
        if pretrained is not None and isinstance(pretrained.card, TextCard):
            card = pretrained.card
            check_belongs(settings, run.origin, card)
        elif pretrained is not None and settings.tokenizer_is_trained:
            run.console.say(
                f"note: {pretrained.source_text} comes without a tokenizer: give the one that it "
                "was trained with by --tokenizer"
            )
        tokenizer = None  # as the settings say
        if settings.pretrained or not settings.tokenizer_is_trained:
            tokenizer = card and card.tokenizer
        return load_text_task(
            settings,
            run.device,
            run.console,
            tokenizer,
            run.exchange,
            run.workers,
            run.micro_batches,
        )


def check_belongs(settings, origin: dict, card: TextCard) -> None:
    """UserError if a setting contradicts `card`, with which the weights were trained. A recipe's
    tokenizer gives way to weights that the command line names."""
    gives_way = {DEFAULT, FILE} if origin["pretrained"] == COMMAND_LINE else {DEFAULT}
    for name in ("tokenizer", "vocab_size", "lowercase", "min_freq", "vocab"):
        if origin[name] not in gives_way:
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
    if card.clean != settings.clean_text and not settings.action.trains:
        flag = "--clean_text" if card.clean else "--no_clean_text"
        raise UserError(
            f"--pretrained {settings.pretrained}: its weights were trained with {flag}; give that "
            "too"
        )
