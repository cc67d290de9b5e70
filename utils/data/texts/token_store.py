"""Data sets as token ids, and the folders in which they are kept.

A folder holds `<split>_tokens.npy`, `<split>_offsets.npy` and `<split>_labels.npy` for each split,
`<split>_lines.npy` for those whose texts are lines of a file,
`tokenizer.json`, and `index.json` with the checksums of all other files (`<split>_<array>` or
"tokenizer" -> SHA-256, hexadecimal) and of itself, so that damage of any kind is noticed when the
folder is opened.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...files import write_synced
from ..cache_folder import built_folder, write_array
from .sources import MAX_TOKENS
from .tokenizer import unknown_id

VERSION = 2  # of a folder's layout
SPLITS = ("train", "test", "val")
_ARRAYS = ("tokens", "offsets", "labels", "lines")
# What `index.json` holds of TokenizedData.
_INDEXED = ("name", "classes", "pad_id", "cls_id", "vocab_size", "synthetic", "skipped", "notes")


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """Samples of token ids, one after the other: sample i is
    `tokens[offsets[i]:offsets[i + 1]]`, and begins with the class token."""

    tokens: np.ndarray  # (all,) uint16 or int32; may be a read-only memory map
    offsets: np.ndarray  # (samples + 1,) int64
    labels: np.ndarray  # (samples,) int64
    lines: np.ndarray | None = None  # (samples,) int64, see Texts

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.dtype in (np.uint16, np.int32)
        assert self.offsets.shape == (len(self.labels) + 1,) and self.offsets.dtype == np.int64
        assert self.labels.ndim == 1 and self.labels.dtype == np.int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (samples,) int64."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class TokenizedData:
    """A whole data set as token ids.

    `tokenizer_json` is for `tokenizer.tokenizer_from_json`. `fingerprint` is a SHA-256
    (hexadecimal) of all that is trained and tested on: ids, labels, class names and tokenizer.
    `skipped` counts the bad rows left out; `notes` are lines for the console.
    """

    name: str
    classes: list[str]
    tokenizer_json: str
    pad_id: int
    cls_id: int
    vocab_size: int
    train: TokenSplit
    test: TokenSplit
    val: TokenSplit | None
    fingerprint: str
    source: str
    synthetic: bool
    skipped: int
    notes: list[str]
    files: Mapping[str, Path] = field(default_factory=dict)  # of the texts, see TextSource

    @property
    def splits(self) -> dict[str, TokenSplit]:
        splits = {"train": self.train, "test": self.test, "val": self.val}
        return {name: split for name, split in splits.items() if split is not None}


def lines_on_losses(
    encoded: Mapping[str, Sequence[TokenSplit]],
    tokenizer_json: str,
    max_len: int,
    trained: bool = False,
    of_encoder: bool = False,
) -> list[str]:
    """Lines for the console on what a model that reads `max_len` tokens of a text does not see, if
    that is 1 % of the tokens or texts of a split, or more.

    Args:
        encoded: name of a split -> its samples, in parts.
        trained: the model is trained already, so that no flag helps.
        of_encoder: the tokenizer belongs to an encoder, and cannot be another.
    """
    unknown, not_known, cut = unknown_id(tokenizer_json), {}, {}
    enough, held = 0, 100.0
    for name, parts in encoded.items():
        lengths = np.concatenate([part.lengths for part in parts])
        ids = [] if unknown is None else [part.tokens for part in parts]
        found = sum(int(np.count_nonzero(tokens == unknown)) for tokens in ids)
        not_known[name] = 100 * found / max(1, int(lengths.sum()) - len(lengths))  # no class tokens
        cut[name] = 100 * float((lengths > max_len).mean())
        enough = max(enough, int(np.percentile(lengths, 99, method="higher")))
        held = min(held, 100 * float((lengths < MAX_TOKENS).mean()))
    remedy = f"--max_len {enough} would hold 99 % of all texts whole"
    if enough >= MAX_TOKENS:  # longer texts are stored like those of this length
        remedy = f"--max_len {MAX_TOKENS}, the most, holds {held:.0f} % of all texts whole"
    lines = []
    other = "" if of_encoder else "--tokenizer bpe_unicode knows every character"
    for what, shares, instead in (
        ("unknown tokens", not_known, other),
        (f"texts cut by --max_len {max_len}", cut, remedy),
    ):
        large = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items() if share >= 1)
        remedy = f": {instead}" if instead and not trained else ""
        lines += [f"note: {what} ({large}){remedy}"] if large else []
    return lines


def _sums(tokenizer_json: str, splits: dict[str, TokenSplit]) -> dict[str, str]:
    sums = {"tokenizer": hashlib.sha256(tokenizer_json.encode()).hexdigest()}
    for name, split in splits.items():
        for kind, array in _arrays(split).items():
            digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array))
            sums[f"{name}_{kind}"] = digest.hexdigest()
    return sums


def _arrays(split: TokenSplit) -> dict[str, np.ndarray]:
    arrays = {kind: getattr(split, kind) for kind in _ARRAYS}
    return {kind: array for kind, array in arrays.items() if array is not None}


def content_fingerprint(
    classes: list[str], tokenizer_json: str, splits: dict[str, TokenSplit]
) -> str:
    """SHA-256 (hexadecimal) over class names, tokenizer, ids and labels."""
    return _combine(classes, _sums(tokenizer_json, splits))


def _combine(classes: list[str], sums: dict[str, str]) -> str:
    content = sorted(item for item in sums.items() if not item[0].endswith("_lines"))
    return hashlib.sha256(json.dumps([classes, content]).encode()).hexdigest()


def open_cache(folder: Path) -> TokenizedData | None:
    """Maps in the cache at `folder`; None if there is none or it is damaged."""
    try:
        raw = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        index = raw["index"]
        if raw["sum"] != _index_sum(index) or index.pop("version") != VERSION:
            return None
        sums = index.pop("sums")
        text = (folder / "tokenizer.json").read_bytes().decode()
        splits = {}
        for name in SPLITS:
            if f"{name}_tokens" in sums:
                arrays = {
                    kind: np.load(folder / f"{name}_{kind}.npy", mmap_mode="r", allow_pickle=False)
                    for kind in _ARRAYS
                    if f"{name}_{kind}" in sums
                }
                splits[name] = TokenSplit(**arrays)
        if _sums(text, splits) != sums:
            return None
        return TokenizedData(
            **index,
            tokenizer_json=text,
            train=splits["train"],
            test=splits["test"],
            val=splits.get("val"),
            fingerprint=_combine(index["classes"], sums),
            source=str(folder),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError):
        return None


def keep(folder: Path, data: TokenizedData) -> None:
    """Writes the cache `folder`, unless another process has written it. Raises OSError."""
    index = {"version": VERSION} | {name: getattr(data, name) for name in _INDEXED}
    index["sums"] = _sums(data.tokenizer_json, data.splits)
    with built_folder(folder, lambda: open_cache(folder) is not None) as temporary:
        for name, split in data.splits.items():
            for kind, array in _arrays(split).items():
                write_array(temporary / f"{name}_{kind}.npy", array)
        write_synced(temporary / "tokenizer.json", data.tokenizer_json.encode())
        content = {"sum": _index_sum(index), "index": index}
        write_synced(temporary / "index.json", json.dumps(content, indent=1).encode())


def _index_sum(index: dict) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
