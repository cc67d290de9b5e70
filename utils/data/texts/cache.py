"""Texts to token ids, once: every later run maps in what the first has written.

The cache is a folder `<cache_dir>/text-<key>/` (`token_store`). Its key is made of the source
files' content and of everything that decides what becomes of it, so that the texts are not even
parsed when it is found.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from utils.data.splits import stratified_split, stratified_subset
from utils.data.texts.csv_texts import file_sum
from utils.data.texts.sources import TextData, Texts, TextSource, open_text_data
from utils.data.texts.token_store import VERSION as STORE_VERSION
from utils.data.texts.token_store import (
    TokenizedData,
    TokenSplit,
    content_fingerprint,
    keep,
    open_cache,
)
from utils.data.texts.tokenizer import (
    KINDS,
    MAX_TOKENS,
    cls_id,
    encode,
    load_tokenizer,
    pad_id,
    tokenizer_from_json,
    train_tokenizer,
    vocabulary_size,
)
from utils.errors import UserError
from utils.files import reason

VERSION = 1  # of the division and of the tokenizers' training; part of every key
_CALLED = {"train": "training texts", "test": "test texts", "val": "validation texts"}


def load_tokenized(
    name: str,
    *,
    data_dir: str | Path,
    cache_dir: str | Path,
    train_file: str | Path | None = None,
    test_file: str | Path | None = None,
    val_file: str | Path | None = None,
    text_columns: Sequence[str] | None = None,
    label_column: str | None = None,
    on_bad: str = "error",
    clean: bool = True,
    test_fraction: float | None = None,
    val_fraction: float = 0.0,
    subset: float | None = None,
    seed: int = 0,
    tokenizer: str = "wordpiece",
    vocab_size: int = 8000,
    lowercase: bool = True,
    tokenizer_json: str | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: bool = True,
) -> TokenizedData:
    """The data set `name` of `TEXT_DATASETS` as token ids, from the cache or into it.

    Args (the others are those of `texts.load_text_data`):
        cache_dir: where tokens are kept.
        val_fraction: share in (0, 1) of the training texts held out for validation; 0: none.
        subset: of what is left, train on this part: a fraction up to 1, or a number of texts.
        seed: decides which texts are held out for validation and which make the subset.
        tokenizer: "wordpiece", "bpe" or "unigram", trained on the chosen training texts alone;
            or the path of a tokenizer.json.
        vocab_size, lowercase: of a tokenizer that is trained.
        tokenizer_json: of a tokenizer that is taken instead: that of weights to go on with.
        max_tokens: of a sample, the class token included; what is longer is cut off.
        progress: show a bar on a terminal, or a plain line otherwise.

    Raises:
        UserError: data or tokenizer are missing, broken or unsuitable, or a setting does not
            apply. A cache that cannot be written is no error, but a note.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(f"--val_fraction must be at least 0 and below 1, not {val_fraction}")
    if max_tokens < 2:
        raise UserError(f"a sample needs room for 2 tokens at least, not {max_tokens}")
    if val_fraction and val_file is not None:
        raise UserError("--val_fraction has no effect with --val_file: leave one of them out")
    file = None if tokenizer_json is not None else _tokenizer_file(tokenizer)
    source = open_text_data(
        name,
        data_dir=data_dir,
        train_file=train_file,
        test_file=test_file,
        val_file=val_file,
        text_columns=text_columns,
        label_column=label_column,
        on_bad=on_bad,
        clean=clean,
        test_fraction=test_fraction,
    )
    drawn = bool(val_fraction or subset is not None)
    if tokenizer_json is not None:
        kind = ["json", hashlib.sha256(tokenizer_json.encode()).hexdigest()]
    else:
        kind = [tokenizer, vocab_size, lowercase] if file is None else file_sum(file)
    settings = {
        "columns": [list(text_columns or ()), label_column],
        "rows": [on_bad, clean],
        "division": [test_fraction, val_fraction, subset, seed if drawn else None],
        "tokenizer": kind,
        "max_tokens": max_tokens,
    }
    folder = Path(cache_dir) / f"text-{_key(source, settings)}"
    kept = open_cache(folder)
    if kept is not None:
        return replace(kept, source=f"{source.description}, mapped in from {folder}")
    texts = source.load()
    splits = _divide(texts, val_fraction, subset, seed)
    if tokenizer_json is not None:
        chosen = tokenizer_from_json(tokenizer_json)
    elif file is None:
        if progress:
            count = len(splits["train"])
            print(f"training a {tokenizer} tokenizer on {count:,} texts, once", file=sys.stderr)
        chosen = train_tokenizer(
            splits["train"].texts, kind=tokenizer, vocab_size=vocab_size, lowercase=lowercase
        )
    else:
        chosen = load_tokenizer(file)
    data = _encode_all(texts, splits, chosen, max_tokens, progress)
    try:
        keep(folder, data)
    except OSError as error:
        note = (
            f"the tokens cannot be kept in {cache_dir} ({reason(error)}): name another --cache_dir"
        )
        return replace(data, notes=[*data.notes, note])
    return replace(open_cache(folder) or data, source=f"{data.source}, encoded into {folder}")


def _tokenizer_file(tokenizer: str) -> Path | None:
    """The file that --tokenizer names; None where it names a kind.

    Raises:
        UserError: it names neither.
    """
    if tokenizer in KINDS:
        return None
    path = Path(tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{path} is not there: --tokenizer takes one of {', '.join(KINDS)}, or the path of a "
            "tokenizer.json"
        )
    return path


def _key(source: TextSource, settings: dict) -> str:
    """Files count by their role, name (its ending tells the format, notes give it) and content."""
    files = [[role, path.name, file_sum(path)] for role, path in source.files.items()]
    versions = [VERSION, STORE_VERSION, source.version, tokenizers.__version__]
    content = json.dumps([versions, source.name, files, settings], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _divide(
    data: TextData, val_fraction: float, subset: float | None, seed: int
) -> dict[str, Texts]:
    """Validation texts are cut from the training texts first, the subset from what is left."""
    chosen, val = np.arange(len(data.train)), data.val
    if val_fraction:
        chosen, held_out = stratified_split(data.train.labels, val_fraction, seed, data.classes)
        val = data.train.part(held_out)
    if subset is not None:
        amount = subset if subset <= 1 else int(subset) if subset == int(subset) else subset
        chosen = chosen[stratified_subset(data.train.labels[chosen], amount, seed)]
    train = data.train if len(chosen) == len(data.train) else data.train.part(chosen)
    splits = {"train": train, "test": data.test, "val": val}
    return {name: split for name, split in splits.items() if split is not None}


def _encode_all(
    data: TextData,
    splits: dict[str, Texts],
    tokenizer: Tokenizer,
    max_tokens: int,
    progress: bool,
) -> TokenizedData:
    tokens = {}
    for name, split in splits.items():
        ids, offsets = encode(
            tokenizer,
            split.texts,
            max_tokens=max_tokens,
            progress=progress,
            description=_CALLED[name],
        )
        tokens[name] = TokenSplit(ids, offsets, split.labels)
    notes = list(data.notes)
    long = sum(int((split.lengths == max_tokens).sum()) for split in tokens.values())
    if long:
        notes.append(f"{long:,} texts are cut off at {max_tokens:,} tokens, or have just as many")
    text = tokenizer.to_str()
    return TokenizedData(
        name=data.name,
        classes=data.classes,
        tokenizer_json=text,
        pad_id=pad_id(tokenizer),
        cls_id=cls_id(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
        train=tokens["train"],
        test=tokens["test"],
        val=tokens.get("val"),
        fingerprint=content_fingerprint(data.classes, text, tokens),
        source=data.source,
        synthetic=data.synthetic,
        skipped=data.skipped,
        notes=notes,
    )
