"""Files of rows: what is read, what is refused; no bytes may lead to a traceback."""

import csv
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.data.texts import rows
from utils.data.texts.files import read_table
from utils.data.texts.published_csv import ESCAPED
from utils.data.texts.sources import TextRequest, open_text_data
from utils.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(content, name="rows.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read_rows(path, classes=(), line_end=None, **given):
    request = TextRequest(path.parent, **given)
    return rows.read_samples(path, request, classes=classes, line_end=line_end)


def read_texts(path, classes=(), line_end=None, say=lambda line: None, **given):
    request = TextRequest(path.parent, **given)
    return rows.read_texts(path, request, classes=classes, line_end=line_end, say=say)


def samples(path, **given):
    found = read_rows(path, **given)
    return list(zip(found.lines, found.labels, found.texts, strict=True))


def refused(path, *parts, read=read_rows, **given):
    with pytest.raises(UserError) as error:
        read(path, **given)
    message = str(error.value)
    assert "\n" not in message and path.name in message
    for part in parts:
        assert part in message, message


GOOD = [(1, "1", "good news"), (2, "2", "bad news")]


@pytest.mark.parametrize(
    "content",
    [
        "1,good news\n2,bad news\n",
        "1,good news\r\n2,bad news",
        "1,good news\r2,bad news\r",
        '\ufeff"1","good news"\n"2","bad news"\n',
        "1;good news\n2;bad news\n",
        "1|good news\n2|bad news\n",
        "1\tgood news\n2\tbad news\n",
        "1,good\0news\n2,bad news\n",
        "1,good news\n2,bad news\n\n  \n\n",
        "\ufeff1,good news\n2,bad news\n".encode("utf-16-le"),
    ],
)
def test_forms_of_csv(write, content):
    assert samples(write(content)) == GOOD


def test_tsv_and_json_lines(write):
    assert samples(write("1\tgood news\n2\tbad news\n", "x.tsv")) == GOOD
    lines = [{"class": 1, "text": "good news"}, {"text": "bad news", "class": 2, "more": [1]}]
    content = "\n\n".join(map(json.dumps, lines))
    assert samples(write(content, "x.jsonl")) == [GOOD[0], (3, *GOOD[1][1:])]
    packed = gzip.compress(b"1,good news\n2,bad news\n")
    assert samples(write(packed, "x.csv.gz")) == GOOD


def test_quotes_and_line_ends_within_a_cell(write):
    content = '1,"say ""yes"", or\r\nno"\n\n2,"a\nb\nc"\n1,ünï 中文 🙂\n'
    found = samples(write(content), clean=False)
    assert found == [(1, "1", 'say "yes", or\r\nno'), (4, "2", "a\nb\nc"), (7, "1", "ünï 中文 🙂")]


def test_quotes_in_tsv_may_be_plain_characters(write):
    content = '1\t"Yes", he said\n2\t"never closed\n1\tthe "end"\n'
    found = samples(write(content, "x.tsv"))
    assert [text for *_, text in found] == ['"Yes", he said', '"never closed', 'the "end"']
    proper = '1\t"two\nlines"\n2\tone line\n'
    assert samples(write(proper, "y.tsv"))[0] == (1, "1", "two lines")


def test_a_space_before_a_quote(write):
    """The text "good, news" has a comma, which would end it."""
    found = samples(write('1, "good, news"\n2, "bad news"\n1,  "old, but good, news"\n2, none\n'))
    assert [text for *_, text in found] == ["good, news", "bad news", "old, but good, news", "none"]


def test_the_line_by_which_excel_knows_the_separator(write):
    content = "sep=;\r\nlabel;text\r\n1;good news\r\n2;bad, bad news\r\n"
    expected = [(3, "1", "good news"), (4, "2", "bad, bad news")]
    assert samples(write(content)) == expected
    assert samples(write(content.replace("sep=;", '"SEP=;"'))) == expected
    assert samples(write(content.replace(";", "^"))) == expected


def test_the_separator_of_a_file_whose_first_text_has_many_lines(write):
    long = "a line; of two, parts\n" * 500
    found = samples(write(f'1,"{long}"\n' + "2,the next text\n" * 5))
    assert len(found) == 6 and found[1] == (502, "2", "the next text")


def test_json_arrays(write):
    objects = [{"class": 1, "text": "good news"}, {"text": "bad [news], {yes}", "class": 2.0}]
    for name in ("x.json", "x.jsonl"):
        for indent in (None, 2):
            found = samples(write(f"\n{json.dumps(objects, indent=indent)}\n", name))
            assert found == [GOOD[0], (2, "2", "bad [news], {yes}")]
    refused(write('[{"class": 1, "text": "a"}, 2]', "x.json"), "line 2 is not a JSON object")
    refused(write('[{"class": 1, "text": "a"}\n', "x.json"), "line 2 is not valid JSON")
    refused(write('[{"class": 1, "text": "a"}]\n[]', "x.json"), "line 2 is not valid JSON")
    refused(write("[]", "x.json"), "is empty")
    # An error in the middle is told with its line.
    broken = '[\n {"class": 1, "text": "a"},\n {"class": 1, "text": }\n]'
    refused(write(broken, "x.json"), "line 3 is not valid JSON")


def test_fields_of_megabytes(write):
    long = "word " * 400_000
    found = samples(write(f'1,"{long}"\n2,short one\n'))
    assert found[0][2] == long.strip() and found[1][0] == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("1", "has 1 columns where the others have 2"),
        ("1,a b,c", "has 3 columns where the others have 2"),
        (",some text", "has no class"),
        ("1,", "has no text"),
        ("1,<b> </b>", "has no text (after cleaning; --no_clean_text keeps links and markup)"),
        ("1,https://a.b/c", "has no text (after cleaning; --no_clean_text keeps"),
        ('1,"stray " quote"', 'has a stray "'),
        ('1,"never closed', "has a quote that is never closed"),
        ("3,unheard of", "has the class '3', which the training file does not have"),
    ],
)
def test_a_bad_row_is_named_or_skipped(write, row, problem):
    path = write(f'1,one text\n\n2,"two\nlines"\n{row}\n1,the last\n2,very last\n')
    refused(path, f"line 5 {problem}", "or use --on_bad skip", classes=["1", "2"])
    found = read_rows(path, on_bad="skip", max_bad=0.2, classes=["1", "2"])
    assert found.lines == [1, 3, 6, 7] and [line for line, *_ in found.problems] == [5]


def test_too_many_bad_rows(write):
    path = write("".join(f"{i % 4},text {i}\n" for i in range(96)) + "3,\n9,\n,some\n0,a,b\n1,\n")
    found = read_rows(path, on_bad="skip")
    assert len(found.problems) == 5 and found.lost(whole=True) == "; bad are 1 (all) of class '9'"
    with open(path, "a") as file:
        file.write("2,<b>\n")
    refused(
        path, "6 of 102 rows cannot be used (3: has no text; 1: has no class; ",
        "1 of the 25 of class '3'", "1 (all) of class '9'", "--max_bad", on_bad="skip",
    )  # fmt: skip
    assert len(read_rows(path, on_bad="skip", max_bad=0.06).texts) == 96
    refused(path, "6 of 102 rows", "more than 0 % with --max_bad", on_bad="skip", max_bad=0.0)


def test_bytes_that_are_no_characters_are_no_bad_rows(write):
    path = write("".join(f"{i % 2},café {i}\n" for i in range(20)).encode("latin-1"))
    for on_bad in ("error", "skip"):
        refused(path, "line 1 is not UTF-8", "--encoding", on_bad=on_bad)
    found = read_rows(path, encoding="cp1252")
    assert found.texts[0] == "café 0" and found.note.endswith(", read as cp1252")
    line = '{"label": 1, "text": "café"}\n'.encode("cp1252")
    assert samples(write(line, "x.jsonl"), encoding="cp1252") == [(1, "1", "café")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a b"', "is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ('{"text": "a b"}', "has no class"),
        ('{"class": null, "text": "a b"}', "has no class"),
        ('{"class": 1, "text": ["a"]}', "has no text"),
        ('{"class": 1, "text": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"class": ' + "9" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_bad_json_lines(write, line, problem):
    good = '{"class": true, "text": "good news"}\n{"class": 1.0, "text": "bad news"}\n'
    path = write(f"{good}{line}\n", "x.jsonl")
    refused(path, "line 3", problem)
    found = read_rows(path, on_bad="skip", max_bad=0.5)
    assert found.labels == ["true", "1"] and len(found.problems) == 1


def test_many_quotes_that_are_never_closed(write):
    """Each could turn the rest of the file into one row."""
    content = "1,a b\n" + '1,"x ""y\n' * 3000 + "2,c d\n"
    found = read_rows(write(content), on_bad="skip", max_bad=1)
    assert found.texts[0] == "a b" and found.problems


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        ("", "x.csv", "is empty"),
        ("\n \n\r\n", "x.csv", "is empty"),
        ("\ufeff", "x.jsonl", "is empty"),
        ("1,a b\n", "x.xlsx", "must end in .csv"),
        ("1,a b\n", "x", "must end in .csv"),
        ("1,a b\n", "x.txt", "must be .csv, .tsv or .jsonl"),
        (bytes(range(256)) * 10, "x.csv", "is not text"),
        (b"PK\x03\x04 and so on", "x.csv", "is not text"),
        ("привет мир\n".encode("cp1251") * 9, "x.csv", "'привет мир' as cp1251"),
        (b"no gzip", "x.csv.gz", "not a whole gzip file"),
        (gzip.compress(b"1,a b\n" * 100, mtime=0)[:-9], "x.csv.gz", "not a whole gzip file"),
        ("text\nand again\n", "x.csv", "has 1 column,"),
        ("text,label\n", "x.csv", "no row that can be used"),
        ('"\n', "x.csv", "no row can be used"),
        ("{}\n{}\n", "x.jsonl", "has 0 columns,"),
    ],
)
def test_files_that_cannot_be_used(write, content, name, part):
    for on_bad in ("error", "skip"):
        refused(write(content, name), part, on_bad=on_bad)


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "is a folder")
    refused(tmp_path / "gone.csv", "is not there")


def test_texts_to_classify(write):
    assert read_texts(write("one text\n\n  \ntwo &lt;b&gt;texts\n", "x.txt")) == [
        (1, "one text"),
        (4, "two texts"),
    ]
    assert read_texts(write("text\nfirst one\n\nsecond one\n")) == [
        (2, "first one"),
        (4, "second one"),
    ]
    assert read_texts(write('{"text": "a b"}\n{"text": "c"}\n', "x.jsonl")) == [
        (1, "a b"),
        (2, "c"),
    ]
    many = "".join(f"{i % 2},the text {i}\n" for i in range(20))
    assert read_texts(write(many))[3] == (4, "the text 3")
    assert read_texts(write("Sports,he won\nWorld,they met\n"), classes=["Sports", "World"]) == [
        (1, "he won"),
        (2, "they met"),
    ]
    assert read_texts(write("7,x y,z\n"), text_columns=("3",)) == [(1, "z")]
    said = []
    read = read_texts(write("1,<b>\n2,a b\n"), on_bad="skip", say=said.append)
    assert read == [(1, None), (2, "a b")]
    assert said[-1].endswith(
        "1 bad row without a class, in line 1, which has no text (after cleaning)"
    )
    reviews = write('"good food\\n\\nwould go"\n')
    assert read_texts(reviews, line_end=ESCAPED) == [(1, "good food would go")]
    refused(write("1,<b>\n2,a b\n"), "line 1 has no text", "--on_bad skip", read=read_texts)
    refused(write("\n\n", "x.txt"), "no text to classify", read=read_texts)
    bad = write(b"good\nbad \xff\n" + b"good\n" * 9, "x.txt")
    refused(bad, "line 2 is not UTF-8", "--encoding", read=read_texts, on_bad="skip")
    assert read_texts(bad, encoding="latin-1")[1] == (2, "bad ÿ")


PIECES = [
    b'"', b",", b"\n", b"\r", b"\t", b";", b"|", b"\\", b"\0", b"\xff", b"\xef\xbb\xbf",
    b"\xff\xfe", b"1", b"2", b"a b", b"text", b"label", b"{", b"}", b"[",
    b'{"text": "a b", "label": 1}\n', b"sep=;\n", b'[{"text": "a", "label": 1},', b"]",
    b"1,good news\n2,bad news\n", "é\u2028".encode(), b"\x1f\x8b", b"&#39;", b"\x85", b"null", b":",
]  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    st.one_of(st.binary(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join)),
    st.sampled_from(["x.csv", "x.tsv", "x.jsonl", "x.txt", "x.csv.gz"]),
    st.sampled_from(["error", "skip"]),
    st.sampled_from([(), ("text",), ("2",), ("1", "3")]),
    st.booleans(),
)
def test_any_bytes(tmp_path_factory, content, name, on_bad, columns, packed):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(gzip.compress(content) if packed and name.endswith("gz") else content)
    try:
        request = TextRequest(
            path.parent, train_file=path, test_fraction=0.5, text_columns=columns, on_bad=on_bad
        )
        data = open_text_data("csv", request).load()
        assert len(data.classes) >= 2 and len(data.train) and len(data.test)
        assert all(text and text.encode() for text in data.train.texts)
        assert set(np.unique(data.train.labels)) == set(range(len(data.classes)))
        assert on_bad == "skip" or not data.skipped
        for note in data.notes:
            assert "\n" not in note
    except UserError as error:
        assert "\n" not in str(error) and "\r" not in str(error)
    try:
        for line, text in read_texts(path, text_columns=columns, on_bad=on_bad):
            assert line >= 1 and (text is None or text.encode())
    except UserError as error:
        assert "\n" not in str(error)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        ),
        min_size=4,
    )
)
def test_what_a_csv_writer_writes_comes_back(tmp_path_factory, written):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("label", "text"), *written])
    table = read_table(path)
    assert [tuple(row.cells) for row in table.rows[1:]] == [
        (label, text.replace("\0", " ")) for label, text in written
    ]
