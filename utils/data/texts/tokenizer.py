"""Tokenizers: trained on the training texts, or read from a published file.

Both are tokenizers of the `tokenizers` library (https://github.com/huggingface/tokenizers), and are
kept as its JSON. What the library trains depends on the order of a hash table, which differs from
process to process. The training functions here remove that dependence, so that the same texts give
the same JSON.
"""

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ...errors import UserError, one_line
from ..progress import progress_bar
from .files import reading
from .sources import MAX_TOKENS

PAD, UNK, CLS, MASK = "[PAD]", "[UNK]", "[CLS]", "[MASK]"
SPECIAL = [PAD, UNK, CLS, MASK]  # their ids are 0 to 3
MAX_FILE_BYTES = 256 << 20
# Training time grows with the square of a word's length: longer ones (binary data, say) are cut.
_LONG_WORD = re.compile(r"\S{256}(?=\S)")
# For `unsuited_to_wordpiece`. AG News has 0.00007 % of such characters and no longer word.
_LOOKED_AT, _LITTLE, _LONG = 10_000, 0.001, 25  # texts, fraction of the characters, characters
_LEARNABLE = 10  # how often a piece must occur, for bpe_unicode
# GPT-2's words, with \p{L}\p{M} in place of its \p{L}.
_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
CHUNK = 2048  # texts encoded between two updates of the bar
PAD_NAMES = (PAD, "<pad>", "<|pad|>", "<PAD>")
CLS_NAMES = (CLS, "<s>", "<cls>", "<CLS>", "<bos>", "<|startoftext|>")


def train_tokenizer(
    texts: Sequence[str],
    *,
    kind: str = "wordpiece",
    vocab_size: int = 8000,
    lowercase: bool = True,
) -> Tokenizer:
    """A tokenizer for texts like these. The same texts give the same tokenizer, to the byte.

    Args:
        kind: "wordpiece" (BERT's), "bpe" (GPT-2's, of bytes: nothing is unknown), "bpe_unicode"
            (the same with words of all scripts) or "unigram" (SentencePiece's).
        vocab_size: the most tokens that it may have, special ones included; at least 300: 256
            bytes, the special tokens and a few more.
        lowercase: ignore case and, in wordpiece, accents.
    """
    bpe = partial(_train_bpe, unicode=kind == "bpe_unicode")
    train = {"wordpiece": _train_wordpiece, "unigram": _train_unigram}.get(kind, bpe)
    tokenizer = train([_LONG_WORD.sub(r"\g<0> ", text) for text in texts], vocab_size, lowercase)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A", special_tokens=[(CLS, SPECIAL.index(CLS))]
    )
    return tokenizer


def stopwords_pattern() -> str:
    """A regular expression for scikit-learn's English stop words, in any case, and the space after
    them; not for parts of words with an apostrophe or a hyphen, such as don't."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return rf"(?i)(?<![\w'’-])(?:{'|'.join(sorted(ENGLISH_STOP_WORDS))})(?![\w'’-])\s*"


def load_tokenizer(path: Path) -> Tokenizer:
    """Any published tokenizer, from its tokenizer.json.

    It may have a padding token ([PAD], <pad>) and a class token ([CLS], <s>); a missing one is
    added.

    Raises:
        UserError: it cannot be read, or is not a tokenizer.
    """
    with reading(path), open(path, "rb") as file:
        content = file.read(MAX_FILE_BYTES)
    try:
        return tokenizer_from_json(content.decode())
    except ValueError as error:
        raise UserError(
            f"{path} is not a tokenizer ({error}): --tokenizer takes a tokenizer.json as the "
            "tokenizers library writes it"
        ) from error


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer of a JSON text, ready for `encode`. Raises ValueError."""
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for names in (PAD_NAMES, CLS_NAMES):
            if _find(tokenizer, names) is None:
                tokenizer.add_special_tokens([names[0]])
        tokenizer.encode("a b")
    except BaseException as error:
        # A panic in the library's Rust code arrives as a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(one_line(error, 200)) from error
    return tokenizer


def pad_id(tokenizer: Tokenizer) -> int:
    """The id of the padding token."""
    return _find(tokenizer, PAD_NAMES)


def cls_id(tokenizer: Tokenizer) -> int:
    """The id of the token that every sample begins with."""
    return _find(tokenizer, CLS_NAMES)


def end_id(tokenizer: Tokenizer) -> int | None:
    """The id of the token that published encoders put after a text; None: none. Raises ValueError
    for a tokenizer that does not put one token before a text, and at most one after it."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    if whole[: 1 + len(bare)] != [cls_id(tokenizer), *bare] or len(whole) > len(bare) + 2:
        raise ValueError(f"it makes {tokenizer.encode('a').tokens} of the text 'a'")
    return whole[-1] if len(whole) == len(bare) + 2 else None


def unknown_id(tokenizer_json: str) -> int | None:
    """The id of the token for what the tokenizer of this JSON does not know; None: it knows all."""
    model = json.loads(tokenizer_json)["model"]
    if "unk_id" in model:  # of unigram, whose vocabulary is a list
        return model["unk_id"]
    return model["vocab"].get(model.get("unk_token"))


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: published vocabularies may have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_tokens: int = MAX_TOKENS,
    described: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all texts, one after the other, computed by the library's threads.

    Returns `(tokens, offsets)`: text i is `tokens[offsets[i]:offsets[i + 1]]`. It begins with the
    class token and has `max_tokens` at most; a special token's name in a text is ordinary text.
    `tokens` are uint16, or int32 if the vocabulary is too large for that; `offsets` are
    (texts + 1,) int64. `described` names the texts in a bar on a terminal, or else in a line; "":
    neither is shown.
    """
    assert max_tokens >= 1
    # Unless this is set, the library warns at every later fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    dtype = np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.int32
    start = [cls_id(tokenizer)]
    offsets = np.zeros(len(texts) + 1, np.int64)
    pieces = []
    tokenizer.encode_special_tokens = True
    with progress_bar(
        bool(described), f"encoding {len(texts):,} {described}, once",
        desc=f"encoding {described}", total=len(texts), unit=" texts", leave=False,
    ) as bar:  # fmt: skip
        for first in range(0, len(texts), CHUNK):
            chunk = list(texts[first : first + CHUNK])
            encodings = tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
            ids = [start + encoding.ids[: max_tokens - 1] for encoding in encodings]
            lengths = [len(sample) for sample in ids]
            offsets[first + 1 : first + 1 + len(chunk)] = lengths
            pieces.append(np.fromiter(chain.from_iterable(ids), dtype, sum(lengths)))
            bar.update(len(chunk))
    np.cumsum(offsets, out=offsets)
    return np.concatenate(pieces) if pieces else np.empty(0, dtype), offsets


def decoded(tokenizer: Tokenizer, tokens: np.ndarray, offsets: np.ndarray) -> Iterator[str]:
    """The texts that `encode` has made these of, as far as the tokens tell, without the class
    token."""
    for first in range(0, len(offsets) - 1, CHUNK):
        borders = offsets[first : first + CHUNK + 1]
        ids = [tokens[start + 1 : end].tolist() for start, end in pairwise(borders)]
        yield from tokenizer.decode_batch(ids, skip_special_tokens=False)


def _find(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    found = (tokenizer.token_to_id(name) for name in names)
    return next((place for place in found if place is not None), None)


def _train_wordpiece(texts: Sequence[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """The library breaks ties between pieces by the ids of their characters, and numbers those
    inside words (##a) in the order of its hash table. So that their ids are fixed beforehand, they
    are passed as special tokens; the trained vocabulary is then put into a tokenizer in which they
    are not special.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters = _characters(texts, tokenizer.normalizer, vocab_size // 3)
    inner = [
        f"##{character}"
        for character in characters
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{character}")) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL + inner,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token=UNK))
    trained.normalizer, trained.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trained.decoder = decoders.WordPiece()
    return trained


def unsuited_to_wordpiece(texts: Sequence[str], vocab_size: int, lowercase: bool) -> str:
    """Why wordpiece would lose what some of these texts say; "" if it would not.

    It removes marks (accents, vowel signs), has no room for more characters than a third of the
    vocabulary, makes one unknown token of a word of over 100 characters, and learns long and rare
    words whole, which says nothing about new ones.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    words = total = lost = 0
    texts = texts[:: 1 + len(texts) // _LOOKED_AT]
    for text in texts:
        sizes = [len(word) for word in text.split()]
        words, total = words + len(sizes), total + sum(sizes)
        if not text.isascii():
            counts.update(text)
        if max(sizes, default=0) > _LONG:
            # NFC: else a syllable of Korean would count as three.
            normal = unicodedata.normalize("NFC", normalizer.normalize_str(text))
            found = (len(word) for word, _ in splitter.pre_tokenize_str(normal))
            lost += sum(size for size in found if size > _LONG)
    if words < 2 * len(texts) or total > 10 * words:
        return "wordpiece learns words whole, and these texts have few or long ones"
    for character in "\ufe0e\ufe0f":  # they say how an emoji is drawn
        del counts[character]
    for character, count in counts.items():
        seen = normalizer.normalize_str(character).strip()
        whole = character.lower() if lowercase else character
        if unicodedata.normalize("NFD", seen) != unicodedata.normalize("NFD", whole).strip():
            lost += count
    lost += sum(sorted(counts.values(), reverse=True)[vocab_size // 3 :])
    if lost <= _LITTLE * total:
        return ""
    return (
        f"wordpiece would lose {100 * min(1, lost / total):.1f} % of the characters (accents, "
        f"vowel signs, words of over {_LONG} characters)"
    )


def _train_bpe(
    texts: Sequence[str], vocab_size: int, lowercase: bool, unicode: bool = False
) -> Tokenizer:
    """Byte-level BPE: all bytes are in the vocabulary from the start, which fixes every id.

    With `unicode` a word keeps its marks (accents, vowel signs), before and after which GPT-2's
    words end, and rare pieces are left out: without spaces, whole texts would become tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(normalizers.NFC(), lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if unicode:
        prefix = normalizers.Prepend(" ")
        tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, prefix])
        words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEARNABLE if unicode else 0,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_unigram(texts: Sequence[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """The library's scores differ from process to process in their last digits: they are rounded.
    It also adds single characters, so that it can spell every word, and gives them scores in the
    order of its hash table: these are given again, in the order of the characters. The library
    fails if there are too many characters: the rarest, beyond a third of the vocabulary, are left
    out.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = _normalizer(normalizers.NFKC(), lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(_spelled(texts, tokenizer.normalizer, vocab_size // 3), trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    scores = {piece: round(score, 6) for piece, score in pieces if piece not in SPECIAL}
    single = sorted(piece for piece in scores if len(piece) == 1)
    added = min(scores.values(), default=0.0) + 1e-4 * len(single)  # theirs are 1e-4 apart
    lowest = [piece for piece in single if scores[piece] <= added]
    scores |= zip(lowest, sorted(scores[piece] for piece in lowest), strict=True)
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    tokenizer.model = models.Unigram([(name, 0.0) for name in SPECIAL] + ranked, SPECIAL.index(UNK))
    return tokenizer


def _normalizer(form: normalizers.Normalizer, lowercase: bool) -> normalizers.Normalizer:
    return normalizers.Sequence([form, normalizers.Lowercase()]) if lowercase else form


def _spelled(texts: Sequence[str], normalizer: normalizers.Normalizer, most: int) -> Iterator[str]:
    """The normalised texts, in which all but the `most` most frequent characters are spaces."""
    allowed = {*_characters(texts, normalizer, most), " "}
    for text in texts:
        text = normalizer.normalize_str(text)
        if not allowed.issuperset(text):
            text = "".join(c if c in allowed else " " for c in text)
        yield text


def _characters(texts: Sequence[str], normalizer: normalizers.Normalizer, most: int) -> list[str]:
    """The `most` most frequent characters of the normalised texts, sorted."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        for normal in normalizer.normalize_str(character):
            if not normal.isspace():
                counts[normal] += count
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(ranked[:most])
