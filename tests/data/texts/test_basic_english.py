"""torchtext's tokenizer and vocabulary: the same tokens and ids as torchtext gives."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from utils.data.texts.basic_english import load_vocabulary, train_basic_english
from utils.data.texts.tokenizer import (
    SPECIAL,
    cls_id,
    encode,
    pad_id,
    tokenizer_from_json,
    vocabulary_size,
)
from utils.data.texts.tokenizer_request import TokenizerRequest
from utils.errors import UserError

FILE = Path(__file__).with_name("basic_english_cases.json")  # what torchtext itself has given
CASES = json.loads(FILE.read_text(encoding="utf-8"))["cases"]


def basic_english(text: str) -> list[str]:
    """The tokens of a text, one rule after the other."""
    text = text.lower()
    for pattern, replacement in (
        ("'", " '  "), ('"', ""), (r"\.", " . "), (r"<br />", " "), (",", " , "), (r"\(", " ( "),
        (r"\)", " ) "), ("!", " ! "), (r"\?", " ? "), (";", " "), (":", " "), (r"\s+", " "),
    ):  # fmt: skip
        text = re.sub(pattern, replacement, text)
    return text.split()


def vocabulary(texts, min_freq=1, max_tokens=None) -> list[str]:
    """torchtext.vocab.build_vocab_from_iterator with our special tokens."""
    counts = Counter(token for text in texts for token in basic_english(text))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if max_tokens is not None:
        ranked = ranked[: max_tokens - len(SPECIAL)]
    return SPECIAL + [token for token in ranked if counts[token] >= min_freq]


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def split(text: str) -> list[str]:
    """The tokens by the library, of a vocabulary that has them all."""
    tokenizer = train_basic_english([text])
    return tokenizer.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(("text", "tokens"), CASES)
def test_torchtexts_own_tokens(text, tokens):
    assert basic_english(text) == tokens
    assert split(text) == tokens


def has_age(character: str) -> bool:
    """Whether this Python knows the character: later ones may have a lower case."""
    return unicodedata.category(character) not in ("Cn", "Cs", "Co")


TEXTS = st.lists(
    st.sampled_from(
        ["'", '"', ".", "<br />", "<BR />", ",", "(", ")", "!", "?", ";", ":", " ", "\t"]
    )
    | st.sampled_from(["a", "B", "Σ", "σ", "\u0345", "\u00ad", "ʰ", "İ", "\x1c", "\x85", "\u2028"])
    | st.characters(exclude_categories=("Cs", "Co")).filter(has_age)
).map("".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_any_text(text):
    assert split(text) == basic_english(text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("abB .'Σς", max_size=12), max_size=8),
    st.integers(1, 3),
    st.none() | st.integers(5, 12),
)
def test_any_vocabulary(texts, min_freq, max_tokens):
    tokenizer = train_basic_english(texts, min_freq=min_freq, vocab_size=max_tokens)
    assert tokens_of(tokenizer) == vocabulary(texts, min_freq, max_tokens)


def test_ids_saved_and_read_again():
    texts = ["The cat sat.", "the CAT slept!", "[CLS] a dog [PAD]"]
    tokenizer = train_basic_english(texts, min_freq=2)
    assert tokens_of(tokenizer) == [*SPECIAL, "cat", "the"]
    tokens, _ = encode(tokenizer, ["The dog sat on the cat"])
    assert tokens.tolist() == [2, 5, 1, 1, 1, 5, 4]  # [CLS], and [UNK] for what is rare
    again = tokenizer_from_json(tokenizer.to_str())
    assert again.to_str() == tokenizer.to_str()
    assert again.encode("The dog sat on the cat").ids == tokens.tolist()  # as other programs read
    # A special token's name in a text is ordinary text: in lower case it is another token.
    assert encode(train_basic_english(texts), ["[PAD]"])[0].tolist()[1:] != [0]


def test_a_vocabulary_file(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("<unk>\n<pad>\nthe\n.\r\ncat\n\n", encoding="utf-8")
    tokenizer = TokenizerRequest("basic_english", vocab=path).make(["never read"])
    assert tokens_of(tokenizer) == ["<unk>", "<pad>", "the", ".", "cat", "[CLS]"]
    assert (pad_id(tokenizer), cls_id(tokenizer), vocabulary_size(tokenizer)) == (1, 5, 6)
    assert encode(tokenizer, ["The cat sat."])[0].tolist() == [5, 2, 4, 0, 3]
    again = tokenizer_from_json(tokenizer.to_str())
    assert again.encode("The cat sat.").ids == [5, 2, 4, 0, 3]


def test_a_vocabulary_file_without_special_tokens(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("a\nb\n")
    tokenizer = load_vocabulary(path)
    assert tokens_of(tokenizer) == ["a", "b", "[PAD]", "[UNK]", "[CLS]"]
    assert encode(tokenizer, ["b c"])[0].tolist() == [4, 1, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a\nb 7\n", "line 2 has white space"),
        (b"a\n\nb\n", "line 2 is empty"),
        (b"a\nb\na\n", "line 3 repeats the token of line 1"),
        (b"a\n\xff" + b"b" * 20, "line 2 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_vocabulary(tmp_path, content, words):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as refused:
        load_vocabulary(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_what_decides_the_ids_decides_the_cache(tmp_path):
    (tmp_path / "one").write_text("a\n")
    (tmp_path / "two").write_text("b\n")
    requests = [
        TokenizerRequest("basic_english"),
        TokenizerRequest("basic_english", min_freq=2),
        TokenizerRequest("basic_english", vocab_size=None),
        TokenizerRequest("basic_english", vocab=tmp_path / "one"),
        TokenizerRequest("basic_english", vocab=tmp_path / "two"),
    ]
    identities = [json.dumps(request.identity()) for request in requests]
    assert len(set(identities)) == len(identities)
    with pytest.raises(UserError, match="gone is not there"):
        TokenizerRequest("basic_english", vocab=tmp_path / "gone").identity()


def test_many_texts_are_encoded_as_one_by_one():
    texts = [f"Word{number % 97}, it's {number}" for number in range(300)]
    tokenizer = train_basic_english(texts, min_freq=2)
    ids = {token: place for place, token in enumerate(vocabulary(texts, 2))}
    tokens, offsets = encode(tokenizer, texts)
    for number in (0, 150, 299):
        expected = [2] + [ids.get(token, 1) for token in basic_english(texts[number])]
        assert tokens[offsets[number] : offsets[number + 1]].tolist() == expected
    assert tokens.dtype == np.uint16
