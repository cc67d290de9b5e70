"""Which columns are text and class, and whether there is a header: as named, and as guessed."""

import csv
import json

import numpy as np
import pytest

from utils.data.texts.columns import choose_columns
from utils.data.texts.files import read_table
from utils.errors import UserError


@pytest.fixture
def table(tmp_path):
    def table(rows, name="rows.csv"):
        path = tmp_path / name
        with open(path, "w", encoding="utf-8", newline="") as file:
            if name.endswith("jsonl"):
                file.writelines(json.dumps(row) + "\n" for row in rows)
            else:
                csv.writer(file).writerows(rows)
        return read_table(path)

    return table


def columns(table, texts=(), label=None, **given):
    found = choose_columns(table, texts, label, **given)
    return found.label, found.texts, found.header


def rows(form, n=20, seed=0):
    """`n` rows with columns of the kinds in `form`, such as "class title text id"."""
    rng = np.random.default_rng(seed)
    kinds = {
        "class": lambda i: str(1 + i % 4),
        "name": lambda i: ["spam", "ham"][i % 2],
        "title": lambda i: f"Headline of item {rng.integers(1000)}",
        "text": lambda i: " ".join(f"word{rng.integers(99)}" for _ in range(12)),
        "id": lambda i: str(1000 + 7 * i),
        "word": lambda i: f"w{rng.integers(10**6)}",
        "-": lambda i: "",
    }
    return [[kinds[kind](i) for kind in form.split()] for i in range(n)]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("class text", (0, [1])),
        ("text class", (1, [0])),
        ("class title text", (0, [1, 2])),
        ("id text name", (2, [1])),
        ("id name title text", (1, [2, 3])),
        ("name word", (0, [1])),
    ],
)
@pytest.mark.parametrize("header", [None, "known", "unknown"])
def test_guesses_by_content(table, form, expected, header):
    data = rows(form)
    if header == "known":
        first = {"class": "Class Index", "name": "Label", "text": "Description", "word": "text"}
        data.insert(0, [first.get(kind, kind) for kind in form.split()])
    elif header == "unknown":
        data.insert(0, [f"spalte {kind}s" for kind in form.split()])
    if header == "unknown" and not {"class", "id"} & set(form.split()):
        with pytest.raises(UserError, match=r"'spalte names'.* --header .* --no_header"):
            choose_columns(table(data), [], None)
    found = choose_columns(table(data), [], None, header=header == "unknown" or None)
    assert (found.label, found.texts, found.header) == (*expected, header is not None)
    assert str(expected[0] + 1) in found.note and "rows.csv" in found.note


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (["label", "text"], (0, [1])),
        (["Text", "Sentiment"], (1, [0])),
        (["", "review_text", "stars"], (2, [1])),
        (["id", "title", "body", "category"], (3, [1, 2])),
        (["label_text", "label", "text"], (1, [2])),
    ],
)
def test_guesses_by_name(table, header, expected):
    """The content of the rows tells nothing."""
    data = [header, ["a b"] * len(header), ["c d"] * len(header)]
    assert columns(table(data)) == (*expected, True)


def test_names_of_json_lines(table):
    found = table([{"id": 1, "text": "a b", "label": "x"}, {"label": "y", "text": "c"}], "x.jsonl")
    assert columns(found) == (2, [1], False)
    assert columns(found, ["id"], "text") == (1, [0], False)
    note = choose_columns(found, ["id"], "text").note
    assert note.endswith("class in column 2 (text), text in column 1 (id), without 3 (label)")


def test_a_file_without_header_keeps_its_first_row(table):
    for form in ("class text", "name text", "text name"):
        assert not choose_columns(table(rows(form)), [], None).header


def test_columns_that_the_user_names(table):
    named = table([["a", "Title", "b"], *rows("class title text")])
    assert columns(named, ["b", "Title"], "a") == (0, [2, 1], True)
    assert columns(named, ["title"], "1") == (0, [1], True)
    assert columns(table([["x", "Ünkn", "y"], *rows("class title text")]), ["ünkn"])[2]
    assert columns(table(rows("class title text")), ["3"], "1") == (0, [2], False)
    assert columns(table(rows("class title text")), ["3", "2"]) == (0, [2, 1], False)
    assert columns(table(rows("text class name")), [], "3") == (2, [0], False)


@pytest.mark.parametrize(
    ("texts", "label", "part"),
    [
        (["nothing"], None, "no column 'nothing' (--text_columns): it has label, text"),
        ([], "4", "no column '4' (--label_column)"),
        ([], "0", "no column '0'"),
        ([], "9" * 30, "no column"),
        (["text"], "text", "cannot be both text and class"),
    ],
)
def test_columns_that_are_not_there(table, texts, label, part):
    named = table([["label", "text", "id"], *rows("class text id")])
    with pytest.raises(UserError) as error:
        columns(named, texts, label)
    assert part in str(error.value) and "rows.csv" in str(error.value)


def test_columns_of_the_run_that_a_file_to_predict_has_not(table):
    with pytest.raises(UserError) as error:
        columns(table([["a", "b"], ["x", "y z"]]), ["title"], needs_label=False, header=False)
    assert str(error.value).endswith(
        "no column 'title', which the run was trained with unless you named it: it has 2, and no "
        "header row; name this file's with --text_columns"
    )


def test_known_classes_tell_the_column(table):
    data = [["the only one", "Sports", "x"], ["another one", "Sports", "y"]]
    assert columns(table(data), classes=["Sports", "World"])[0] == 1


def test_texts_alone(table):
    assert columns(table([["text"], ["a b"], ["c d"]]), needs_label=False) == (None, [0], True)
    assert columns(table(rows("id text")), needs_label=False) == (None, [1], False)
    assert columns(table(rows("class text")), needs_label=False) == (0, [1], False)
    one = table([["alone"], ["again"]])
    for header in (False, True):
        assert columns(one, needs_label=False, header=header) == (None, [0], header)
    assert columns(table([["a text that is too long for a name " * 2], ["x"]]), needs_label=False)


# What is no text unless the user says so.


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("created_at", lambda i: f"Mon Apr {1 + i % 28} 09:{10 + i % 50}:00 2009"),
        ("posted", lambda i: f"Mon Apr {1 + i % 28} 22:19:{10 + i % 50} PDT 2009"),
        ("wann", lambda i: f"{1 + i % 28}. März 2009, {i % 24} Uhr"),
        ("quando", lambda i: f"{1 + i % 28} de fev. {1990 + i}"),
        ("когда", lambda i: f"{1 + i % 28} янв 20{10 + i % 10}"),
        ("日期", lambda i: f"2009年{1 + i % 12}月{1 + i % 28}日"),
        ("betrag", lambda i: f"{i} 000,50 EUR"),
        ("reviewerName", lambda i: f"the crazy user {i}"),
        (
            "kunde",
            lambda i: f"{['Ada', 'Émile', 'Anna'][i % 3]} {'van ' * (i % 2)}N{'abc'[i % 3] * i}",
        ),
    ],
)
def test_dates_numbers_and_names(table, header, kind):
    data = [[c, t, kind(i)] for i, (c, t) in enumerate(rows("name text", 60))]
    found = choose_columns(table([["class", "inhalt", header], *data]), [], None)
    assert (found.texts, found.label) == ([1], 0) and found.note.endswith(f"without 3 ({header})")
    assert choose_columns(table([["class", "inhalt", header], *data]), [header], None).texts == [2]


def test_ambiguous_columns_are_asked_for(table):
    data = [
        [c, ["red", "green", "blue"][i % 3], t] for i, (c, t) in enumerate(rows("name text", 40))
    ]
    with pytest.raises(UserError, match=r"may be in column 1 \(art\) or 2 \(farbe\).*--label_col"):
        columns(table([["art", "farbe", "text"], *data]))
    assert columns(table([["art", "is_blue", "text"], *data]), label="art") == (0, [2], True)
    data = [[c, w, f"x{w}"] for c, w in rows("name word", 40)]
    with pytest.raises(UserError, match=r"text is in no column.*--text_columns"):
        columns(table([["label", "id", "url"], *data]))
    names = table([["name", "label"], *(row[::-1] for row in rows("name word", 40))])
    assert columns(names, ["name"]) == (1, [0], True)


def test_a_script_without_spaces(table):
    data = [
        [c, "今天天气很好我们去公园", f"Li Wei{'a' * i}"] for i, (c,) in enumerate(rows("name"))
    ]
    assert columns(table([["label", "评论", "作者"], *data])) == (0, [1], True)


# First rows that are unusual for a header.


@pytest.mark.parametrize(
    ("header", "form", "expected"),
    [
        ("label,text,", "class text -", (0, [1])),
        ("text,text,label", "title text name", (2, [0, 1])),
        ("label,,text", "name id text", (0, [2])),
        (f"{'What do you say about it? ' * 3},label", "text name", (1, [0])),
        ("v1,v2,,,", "name text - - -", (0, [1])),
    ],
)
def test_a_header_with_empty_repeated_or_long_names(table, header, form, expected):
    data = rows(form)
    assert columns(table([header.split(","), *data])) == (*expected, True)
    assert not columns(table(data))[2]


def test_columns_that_are_mostly_empty(table):
    """As in Kaggle's spam.csv, where a few texts go on in the columns without a name."""
    data = rows("name text - -")
    data[3][2:], data[5][2] = ["more of it", "and more"], "more of this"
    assert columns(table([["v1", "v2", "", ""], *data])) == (0, [1], True)
    assert columns(table(data)) == (0, [1], False)


@pytest.mark.parametrize("first", ["news", "1"])
def test_data_with_a_known_name_by_chance(table, first):
    """A class or a title that is the name of a column, too, beside a long text."""
    data = [[first, "Review", "word " * 20], *rows("id name text", 5)]
    classes = ["news", "spam", "ham"] if first == "news" else []
    data[0][1] = "Review" if first == "1" else "good"
    assert not columns(table(data), classes=classes)[2]


def test_repeated_rows(table):
    for count in (2, 30):
        assert not columns(table(rows("class title", count) * 10), needs_label=False)[2]
        with pytest.raises(UserError, match="does its first row"):
            columns(table(rows("title", count) * 10), needs_label=False)
    joined = [["v1", "v2"], *rows("name text"), ["v1", "v2"], *rows("name text", seed=1)]
    assert columns(table(joined))[2]


def test_texts_to_classify_do_not_hold_the_class(table):
    """Columns that were given by number may mean others in a file with other columns."""
    given = {"classes": ["spam", "ham"], "needs_label": False}
    without_id = table(
        [["title", "body, long", "label"], ["a b", "c d", "spam"], ["e", "f", "ham"]]
    )
    with pytest.raises(UserError, match=r"column 3 \(label\) cannot be both text and class"):
        choose_columns(without_id, ["2", "3"], "label", **given)
    with pytest.raises(
        UserError, match=r"column 3 \(label\) holds classes, .* this file's columns"
    ):
        choose_columns(without_id, ["2", "3"], None, **given)
    assert columns(without_id, ["1", "2"], "label", **given) == (2, [0, 1], True)
    assert columns(without_id, ["body, long", "label"], None, **given) == (None, [1, 2], True)
    # A file without the class; the number of its column says nothing here.
    unlabelled = table([["title", "body"], ["a b", "c d"], ["e", "f"]])
    assert columns(unlabelled, ["2"], "label", **given) == (None, [1], True)
    assert columns(unlabelled, ["1"], "1", **given) == (None, [0], True)
