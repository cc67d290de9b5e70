"""Markup, links and broken entities, as AG News has them, are removed; words stay."""

import csv
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.data.texts.clean import clean_text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("President Bush #39;s reelection", "President Bush's reelection"),
        ("users #39; daily habits", "users' daily habits"),
        ("the  #39;explosive expert #39; caught", "the 'explosive expert' caught"),
        ("is an  quot;expert quot; who", 'is an "expert" who'),
        ("said quot;Hello quot;.", 'said "Hello".'),
        ("for the  #36;10 million", "for the $10 million"),
        ("up #151; at last", "up \N{EM DASH} at last"),
        ("&lt;b&gt;...&lt;/b&gt; done", "... done"),
        ("&amp;lt;b&amp;gt;bold&amp;lt;/b&amp;gt;", "bold"),
        ('Inc. &lt;A HREF="http://x.com/q?t=D&amp;u"&gt;D.N&lt;/A&gt; said', "Inc. D.N said"),
        ("&lt;p&gt;\\&lt;/p&gt;text", "text"),
        ('<FONT face="verdana"\\ color="#666">INQUIRER</FONT>', "INQUIRER"),
        ("a<br/>b<!-- no -->c", "a b c"),
        ("see http://local.google.com . When", "see . When"),
        ("(www.vonage.com) to provide", "( ) to provide"),
        ("HTTPS://X.org/a?b=c#d end", "end"),
        ("second\\team of rocketeers", "second team of rocketeers"),
        ("a \\$24 billion\\deal", "a $24 billion deal"),
        ("AT amp;T and R&amp;D", "AT&T and R&D"),
        ("Johnson  amp; Johnson", "Johnson & Johnson"),
        ("1 &lt; 2", "1 < 2"),
        ("caf&eacute; &#233;", "café é"),
        (" two\t words \n\r here\x00now ", "two words here now"),
        ("&#xD800;", "\N{REPLACEMENT CHARACTER}"),
        ("", ""),
        ("<b></b>", ""),
    ],
)
def test_examples(raw, clean):
    assert clean_text(raw) == clean


@pytest.mark.parametrize(
    "text",
    [
        "R&D at AT&T",
        "5 < 6 and 7 > 3",
        "a <b and c> d",
        "Apple <AAPL.O> rose",
        "x <- y; z -> w",
        "Higher; Up; copy; reg; shift;",
        "#1; then #2",
        "Amazon.com, SPACE.com",
        "http:// alone, and www. too",
        "&unknown; stays",
        "50% & more",
        "grüße 中文 العربية 🙂",
    ],
)
def test_what_only_looks_like_markup_stays(text):
    assert clean_text(text) == text


PIECES = [
    "&", "amp;", "#39;", "lt;", "gt;", "quot;", " ", "b", "<", ">", "/", "\\", "a href=", "http://",
    "www.", "x", ";", "#", "&#60;", "&#38;", "nbsp;", "'", '"', "!--", "--", "\n", "é", "\ud800",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_cleaning_a_second_time_changes_nothing(text):
    once = clean_text(text)
    assert clean_text(once) == once
    assert once == " ".join(once.split())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text(text):
    once = clean_text(text)
    assert clean_text(once) == once and len(once) <= len(text) + 1


WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORDS, st.sampled_from([" ", ", ", " & ", " < ", " > ", ". ", "; "]))))
def test_no_word_is_lost(parts):
    broken = {"quot", "amp", "lt", "gt", "nbsp", "apos", "hellip", "mdash", "ndash"}
    parts = [(word, end) for word, end in parts if word not in broken]
    text = "".join(word + end for word, end in parts)
    assert re.findall("[a-z]+", clean_text(text)) == [word for word, _ in parts]


@pytest.mark.parametrize("piece", ["<!--", "&amp;", "<a x=", "http://", "&#", "www.", " ", "<b "])
def test_a_hostile_text_takes_no_longer_than_others(piece):
    start = time.process_time()  # CPU time: the machine may be busy
    clean_text(piece * 40_000)
    assert time.process_time() - start < 5  # some 0.05 s, and minutes if it were quadratic


@pytest.mark.real_data
def test_real_texts(real_texts):
    with open(real_texts / "ag_news_csv" / "test.csv", encoding="utf-8", newline="") as file:
        texts = [clean_text(" ".join(row[1:])) for row in csv.reader(file)]
    assert len(texts) == 7600 and all(texts)
    left = re.compile(r"#\d+;|</?(b|a|font|p|br)\b|&\w+;|\bquot;|https?://\w|\\", re.IGNORECASE)
    assert [text for text in texts if left.search(text)] == []
