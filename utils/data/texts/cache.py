"""Encodes a data set into token ids, and caches them for later runs, which memory-map them.

The cache is the folder `<cache_dir>/text-<key>/` (token_store.py). The key is made of the content
of the source files and of every setting that influences the tokens, so a run that finds the folder
need not even parse the texts.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from ...errors import UserError
from ...files import reason
from ...plural import counted
from ..splits import divide
from .csv_texts import repeated_texts
from .encodings import BY_ROW
from .files import file_sum
from .sources import (
    MAX_TOKENS,
    TextData,
    TextRequest,
    Texts,
    TextSource,
    open_text_data,
)
from .token_store import VERSION as STORE_VERSION
from .token_store import (
    TokenizedData,
    TokenSplit,
    content_fingerprint,
    keep,
    open_cache,
)
from .tokenizer import cls_id, encode, pad_id, vocabulary_size
from .tokenizer_request import TokenizerRequest

VERSION = 1  # of splitting and of tokenizer training; part of every key
_CALLED = {"train": "training texts", "test": "test texts", "val": "validation texts"}


def load_tokenized(
    name: str,
    request: TextRequest,
    tokenizer: TokenizerRequest,
    *,
    cache_dir: str | Path,
    val_fraction: float = 0.0,
    subset: float | None = None,
    seed: int = 0,
) -> TokenizedData:
    """The data set `name` of `TEXT_DATASETS` as token ids, from the cache if they are in it.

    Args:
        tokenizer: one that is to be trained sees only the texts that are trained on.
        cache_dir: where tokens are cached.
        val_fraction: fraction of the training texts that is held out for validation, below 1; 0:
            none.
        subset: how many of the others to train on: a fraction up to 1, or a number of texts; None:
            all.
        seed: decides which texts are held out for validation, and which make up the subset.

    Raises:
        UserError: data or tokenizer are missing, broken or unsuitable. A cache
            that cannot be written is no error: `notes` says so.
    """
    if val_fraction and request.val_file is not None:
        raise UserError("--val_fraction has no effect with --val_file: leave one of them out")
    identity = tokenizer.identity()  # refuses a missing file before anything is downloaded
    source = open_text_data(name, request)
    drawn = bool(val_fraction or subset is not None)
    settings = {
        "columns": [list(request.text_columns), request.label_column],
        "rows": [request.on_bad, request.clean],
        "division": [request.test_fraction, val_fraction, subset, seed if drawn else None],
        "tokenizer": identity,
        "max_tokens": MAX_TOKENS,
    }
    if name == "csv" or request.encoding not in (None, BY_ROW):
        settings["reading"] = [request.encoding, request.header, request.max_bad]
    if name == "csv" and request.group_column is not None:
        settings["groups"] = request.group_column
    folder = Path(cache_dir) / f"text-{_key(source, settings)}"
    cached = open_cache(folder)
    if cached is not None:
        description = f"{source.description}, memory-mapped from {folder}"
        return replace(cached, source=description, files=source.files)
    texts = source.load()
    train, val = divide(texts, val_fraction, subset, seed)
    if val_fraction and not texts.synthetic:
        repeated = repeated_texts("the validation texts held out", train.texts, val.texts)
        texts.notes.extend(repeated)
    splits = {"train": train, "test": texts.test} | ({} if val is None else {"val": val})
    made = tokenizer.make(train.texts, texts.notes.append)
    data = _encode_all(source, texts, splits, made)
    return _write_to_cache(folder, data)


def _write_to_cache(folder: Path, data: TokenizedData) -> TokenizedData:
    """The data, written to the cache and memory-mapped from there if possible."""
    try:
        keep(folder, data)
    except OSError as error:
        note = (
            f"the tokens cannot be kept in {folder.parent} ({reason(error)}): name another "
            "--cache_dir"
        )
        return replace(data, notes=[*data.notes, note])
    description = f"{data.source}, encoded into {folder}"
    return replace(open_cache(folder) or data, source=description, files=data.files)


def _key(source: TextSource, settings: dict) -> str:
    """The key of a cache. File names are part of it: their endings tell the format, and the cached
    notes quote them."""
    files = [[role, path.name, file_sum(path)] for role, path in source.files.items()]
    versions = [VERSION, STORE_VERSION, source.version, tokenizers.__version__]
    content = json.dumps([versions, source.name, files, settings], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _encode_all(
    source: TextSource,
    data: TextData,
    splits: dict[str, Texts],
    tokenizer: Tokenizer,
) -> TokenizedData:
    tokens = {}
    for name, split in splits.items():
        ids = encode(tokenizer, split.texts, MAX_TOKENS, _CALLED[name])
        tokens[name] = TokenSplit(*ids, split.labels, split.lines)
    notes = list(data.notes)
    long = sum(int((split.lengths == MAX_TOKENS).sum()) for split in tokens.values())
    if long:
        notes.append(f"{counted(long, 'text')} cut off at {MAX_TOKENS:,} tokens, or just as long")
    text = tokenizer.to_str()
    return TokenizedData(
        name=source.name,
        classes=data.classes,
        tokenizer_json=text,
        pad_id=pad_id(tokenizer),
        cls_id=cls_id(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
        train=tokens["train"],
        test=tokens["test"],
        val=tokens.get("val"),
        fingerprint=content_fingerprint(data.classes, text, tokens),
        source=source.description,
        synthetic=data.synthetic,
        skipped=data.skipped,
        notes=notes,
        files=source.files,
    )
