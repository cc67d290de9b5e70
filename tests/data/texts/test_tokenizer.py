"""Tokenizers: trained alike in every process, or published; the ids that they give texts."""

import hashlib
import subprocess
import sys
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from utils.data.texts import tokenizer as tokenizer_module
from utils.data.texts.headlines import write_split
from utils.data.texts.sources import TOKENIZERS
from utils.data.texts.tokenizer import (
    SPECIAL,
    cls_id,
    encode,
    pad_id,
    tokenizer_from_json,
    train_tokenizer,
    unknown_id,
    unsuited_to_wordpiece,
    vocabulary_size,
)
from utils.data.texts.tokenizer_request import TokenizerRequest
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def texts():
    return write_split(50, np.random.default_rng(0)).texts


@pytest.fixture(scope="module")
def trained(texts):
    return {kind: train_tokenizer(texts, kind=kind, vocab_size=400) for kind in TOKENIZERS}


def samples(tokens, offsets):
    return [tokens[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_form(trained, texts, kind):
    tokenizer = trained[kind]
    assert 300 < vocabulary_size(tokenizer) <= 400
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [0, 1, 2, 3]
    assert (pad_id(tokenizer), cls_id(tokenizer)) == (0, 2)
    tokens, offsets = encode(tokenizer, texts)
    assert tokens.dtype == np.uint16 and offsets.dtype == np.int64
    assert offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) > 1).all()
    assert (tokens[offsets[:-1]] == 2).all() and tokens.max() < vocabulary_size(tokenizer)
    inner = np.delete(tokens, offsets[:-1])
    assert not np.isin(inner, [0, 1, 2, 3]).any()
    # Other programs that read the JSON get the same ids.
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.encode(texts[3]).ids == samples(tokens, offsets)[3]
    assert again.decode(again.encode("The new chip").ids).strip().lower() == "the new chip"


TRAIN = """
import hashlib, sys
import numpy as np
from utils.data.texts.headlines import write_split
from utils.data.texts.sources import TOKENIZERS
from utils.data.texts.tokenizer import train_tokenizer
texts = write_split(50, np.random.default_rng(0)).texts
for kind in TOKENIZERS:
    json = train_tokenizer(texts, kind=kind, vocab_size=400).to_str()
    print(hashlib.sha256(json.encode()).hexdigest())
"""


@pytest.mark.parametrize("threads", ["true", "false"])
def test_every_process_trains_the_same(trained, threads):
    """Although the order of the library's hash tables differs from process to process."""
    result = subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=ROOT,
        env={"PATH": "", "TOKENIZERS_PARALLELISM": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [hashlib.sha256(trained[kind].to_str().encode()).hexdigest() for kind in TOKENIZERS]
    assert result.stdout.split() == here


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_lowercase(texts, kind):
    for lowercase in (True, False):
        tokenizer = train_tokenizer(texts, kind=kind, vocab_size=400, lowercase=lowercase)
        one, two = (encode(tokenizer, [text])[0].tolist() for text in ("Software", "software"))
        assert (one == two) is lowercase


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_of_all_kinds(trained, kind):
    strange = ["", " ", "中文 العربية 🙂", "x" * 5000, "a\0b", "[CLS] [PAD] [MASK]", "é" * 3]
    tokens, offsets = encode(trained[kind], strange)
    assert samples(tokens, offsets)[0] == [2]
    assert not np.isin(np.delete(tokens, offsets[:-1]), [0, 2, 3]).any()


MANY = [chr(0x4E00 + i) for i in range(2000)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "texts",
    [["a"], ["a b c"], ["é 中文"], ["x" * 10**5], ["?!"], MANY],
)
def test_training_on_very_little_or_many_characters(texts, kind):
    tokenizer = train_tokenizer(texts, kind=kind, vocab_size=600)
    tokens, _ = encode(tokenizer, [*texts, "something else"])
    assert tokens.max() < vocabulary_size(tokenizer) <= 600
    assert tokenizer_from_json(tokenizer.to_str()).to_str() == tokenizer.to_str()


def test_long_texts_are_cut(trained, texts):
    whole, offsets = encode(trained["bpe"], texts)
    cut, cut_offsets = encode(trained["bpe"], texts, max_tokens=10)
    for one, two in zip(samples(whole, offsets), samples(cut, cut_offsets), strict=True):
        assert one[:10] == two


def test_chunks_make_no_difference(trained, texts, monkeypatch):
    whole = encode(trained["bpe"], texts)
    monkeypatch.setattr(tokenizer_module, "CHUNK", 7)
    for one, two in zip(whole, encode(trained["bpe"], texts), strict=True):
        assert np.array_equal(one, two)
    tokens, offsets = encode(trained["bpe"], [])
    assert len(tokens) == 0 and offsets.tolist() == [0]


def test_a_plain_line_where_there_is_no_terminal(trained, texts, capsys):
    encode(trained["bpe"], texts, described="test texts")
    assert capsys.readouterr().err == "encoding 200 test texts, once\n"


def test_a_large_vocabulary_takes_more_bits():
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "far": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens, _ = encode(tokenizer, ["far away"])
    assert tokens.dtype == np.int32 and tokens.tolist() == [2, 70_000, 0]


# Texts that wordpiece does not suit

HINDI, FRENCH = "सेना सूना मेल मूल ", "côte côté salé sale "
UNSUITED = f"""\
{HINDI}
بَيْت بُيُوت ولد نهر
má mà lá là tôi đi
мой мои твой дом
かき かぎ はし ばし
{FRENCH}
{unicodedata.normalize("NFD", FRENCH)}
the \ue001 icon
hi 👩\u200d🚀 you there
the ปลาน้ำ of
it is #averyveryveryverylonghashtag now
a dog {"ACGT" * 30}
Abbatelli
https://a.b/c?d=e
今天天气很好，我们去公园散步吧今天天气很好 好的"""


@pytest.mark.parametrize("text", UNSUITED.splitlines())
def test_texts_that_wordpiece_does_not_suit(text):
    assert unsuited_to_wordpiece([text, text], 30_000, True).startswith("wordpiece ")


@pytest.mark.parametrize(
    "text",
    [
        "Don't panic: it's 5 < 6, R&D!",
        "나는 집에 간다 각각",
        "x < — “y” … 5€",
        "I \u2764\ufe0f it all",
    ],
)
def test_texts_that_wordpiece_suits(text):
    assert unsuited_to_wordpiece([text, "one word more"], 30_000, True) == ""
    # One accent in a long English text changes nothing, and with case wordpiece keeps accents.
    assert unsuited_to_wordpiece(["the old word "] * 200 + ["a café"], 30_000, True) == ""
    assert unsuited_to_wordpiece([HINDI], 30_000, False) == ""
    assert "100.0 %" not in unsuited_to_wordpiece(MANY, 600, True) != ""


def test_words_of_bpe_unicode_keep_their_marks():
    tokenizer = train_tokenizer([HINDI * 10], kind="bpe_unicode")
    assert len(tokenizer.encode("सेना मूल").ids) == 3
    assert len(train_tokenizer([HINDI * 10], kind="bpe").encode("सेना मूल").ids) > 5
    # Rare pieces are no tokens, so a word that occurs once is spelled.
    assert len(tokenizer.encode("abcde").ids) == 7


def test_the_token_for_what_is_unknown(trained):
    found = {kind: unknown_id(tokenizer.to_str()) for kind, tokenizer in trained.items()}
    assert found == {"wordpiece": 1, "bpe": None, "bpe_unicode": None, "unigram": 1}


# Published files


def test_a_published_tokenizer(tmp_path):
    """Like RoBERTa's: other special tokens, and its own template, truncation and padding."""
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "good": 4, "news": 5}
    published = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    published.pre_tokenizer = pre_tokenizers.Whitespace()
    published.add_special_tokens(["<s>", "<pad>", "</s>"])
    published.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    published.enable_truncation(3)
    published.enable_padding(length=9)
    published.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path / "tokenizer.json", tmp_path):
        tokenizer = load(path)
        assert (pad_id(tokenizer), cls_id(tokenizer), vocabulary_size(tokenizer)) == (1, 0, 6)
        assert encode(tokenizer, ["good news good news"])[0].tolist() == [0, 4, 5, 4, 5]


def test_what_a_published_tokenizer_lacks_is_added(tmp_path):
    published = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    published.save(str(tmp_path / "x.json"))
    tokenizer = load(tmp_path / "x.json")
    assert (pad_id(tokenizer), cls_id(tokenizer), vocabulary_size(tokenizer)) == (2, 3, 4)
    assert tokenizer_from_json(tokenizer.to_str()).to_str() == tokenizer.to_str()


def load(path):
    return TokenizerRequest(str(path)).make([])


def refused(path, *parts):
    with pytest.raises(UserError) as error:
        load(path)
    for part in (path.name, *parts):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b"text", b"[" * 10_000])
def test_files_that_are_no_tokenizer(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    refused(tmp_path / "x.json", "is not a tokenizer", "--tokenizer")
    refused(tmp_path / "gone.json", "is not there")
    refused(tmp_path, "is not there")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_tokenizers(trained, data):
    text = trained[data.draw(st.sampled_from(TOKENIZERS))].to_str()
    place = data.draw(st.integers(0, min(len(text), 3000) - 1))
    piece = data.draw(st.sampled_from(["", "0", "-1", "null", '"', "[]", "}", "\\", "99999999999"]))
    try:
        tokenizer_from_json(text[:place] + piece + text[place + 1 + len(piece) :])
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "unigram", "basic_english"])
def test_stopwords_are_left_out(texts, name, tmp_path):
    """By the tokenizer itself, so by what is saved and exported, too; parts of words stay."""
    pytest.importorskip("sklearn")
    more = [*texts, "the Athens of don't over-the-top markets", "athens don't over-the-top markets"]
    request = TokenizerRequest(name, 400, stopwords=True)
    made = tokenizer_from_json(request.make(more, lambda line: None).to_str())
    tokens, offsets = encode(made, ["The Athens OF markets", "Athens markets", "the of and"])
    first, second, empty = samples(tokens, offsets)
    assert first == second and len(first) > 1 and empty == [cls_id(made)]
    assert made.normalizer.normalize_str("of don't THE over-the-top of") == "don't over-the-top"
    assert request.identity() != TokenizerRequest(name, 400).identity()
    plain = request.make([*texts, "the the the " * 900], lambda line: None).get_vocab()
    assert not {"the", "Ġthe", "▁the"} & {*plain}  # no room in the vocabulary is lost to them
