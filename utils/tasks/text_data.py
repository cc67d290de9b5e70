"""The texts of a run: which are read, from where, and how they become tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ..data.class_names import names_notes
from ..data.texts.cache import load_tokenized
from ..data.texts.csv_texts import CLASS_NAMES, class_names, notes_of, read_files, to_texts
from ..data.texts.published_csv import PUBLISHED
from ..data.texts.rows import column_names, read_samples, whole_number
from ..data.texts.sources import TextData, TextRequest, relabel
from ..data.texts.token_store import (
    TokenizedData,
    TokenSplit,
    content_fingerprint,
    lines_on_losses,
)
from ..data.texts.tokenizer import encode, tokenizer_from_json
from ..data.texts.tokenizer_request import TokenizerRequest
from ..exchange import Exchange
from ..plural import counted
from ..reporting.console import Console
from ..settings import TextSettings
from ..weights.card import TextCard
from .sample_names import ids_of_lines


def load_texts(
    settings: TextSettings, console: Console, exchange: Exchange, tokenizer: str | None
) -> TokenizedData:
    """Loads, splits and encodes the texts that the settings name; says what is lost of them.

    Args:
        exchange: with the other ranks.
        tokenizer: JSON of the tokenizer that the weights were trained with; None: the settings name
            it.
    """
    with exchange.in_turn():  # one rank downloads and encodes, the others memory-map its files
        data = load_tokenized(
            settings.dataset,
            text_request(settings),
            TokenizerRequest(
                settings.tokenizer,
                settings.vocab_size,
                settings.lowercase,
                tokenizer,
                settings.min_freq,
                None if settings.vocab is None else Path(settings.vocab),
                settings.stopwords == "english",
            ),
            cache_dir=settings.cache_dir,
            val_fraction=settings.val_fraction,
            subset=settings.subset,
            seed=settings.seed,
        )
    encoded = {name: [split] for name, split in data.splits.items()}
    resumed = settings.resume is not None
    losses = lines_on_losses(
        encoded, data.tokenizer_json, settings.max_len, resumed, settings.encoder is not None
    )
    of_splits = {data.files.get(name, data.files.get("train")) for name in data.splits}
    for path in filter(None, of_splits if settings.id_columns else ()):
        ids_of_lines(path, column_names(settings.id_columns) or (), settings.encoding)
    for note in data.notes + losses + [f"note: {line}" for line in names_notes(data.classes)]:
        console.say(note)
    return data


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
        labels=path(settings.labels),
        # A recipe's gives way to a test file.
        test_fraction=None if settings.test_file else settings.test_fraction,
    )


def read_table(
    path: Path, settings: TextSettings, card: TextCard, say: Callable[[str], None]
) -> tuple[TokenSplit, SimpleNamespace]:
    """(all texts of a table, for the trained model whose card this is; the data set that they
    make: `classes`, `fingerprint`)."""
    ids_of_lines(path, column_names(settings.id_columns) or (), settings.encoding)  # are there
    request, classes = text_request(settings), list(card.classes)
    written = _as_written(path, settings.dataset, classes, request)
    samples = read_files(request, {"test": path}, tuple(written), card.line_end)
    texts = to_texts(samples["test"], written)
    if request.labels is not None:
        changed = relabel(TextData(classes, texts, texts), {"test": path}, request)
        texts = changed.test
        say(*changed.notes)
    tokens, offsets = encode(tokenizer_from_json(card.tokenizer), texts.texts)
    split = TokenSplit(tokens, offsets, texts.labels, texts.lines)
    losses = lines_on_losses({"test": [split]}, card.tokenizer, card.max_len, trained=True)
    for note in notes_of(samples) + losses:
        say(note)
    say(f"{counted(len(texts), 'text')} of {len(classes)} classes from {path}")
    fingerprint = content_fingerprint(classes, card.tokenizer, {"test": split})
    return split, SimpleNamespace(classes=classes, fingerprint=fingerprint)


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
