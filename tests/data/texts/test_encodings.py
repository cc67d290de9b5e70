"""Bytes of a file -> its text; what is not UTF-8 is asked for, with the two likeliest encodings."""

from pathlib import Path

import pytest

from utils.data.texts.encodings import BY_ROW, decode
from utils.errors import UserError

GERMAN = "Das Wetter wird schön, sagte der Bürgermeister; größere Übungen gibt es später."
FILE = Path("rows.csv")


def question(data, encoding=None):
    with pytest.raises(UserError) as error:
        decode(FILE, data, encoding)
    message = str(error.value)
    assert "\n" not in message and message.startswith("rows.csv")
    return message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_what_is_read_without_a_question(encoding):
    for given in (None, "cp1252"):
        text, remark = decode(FILE, f"a,{GERMAN}\nb,中文\n".encode(encoding), given)
        assert text == f"a,{GERMAN}\nb,中文\n"
        assert (remark == ", read as UTF-8") == (given is not None and "utf-8" in encoding)
    assert decode(FILE, b"a,plain\n", "cp1252") == ("a,plain\n", "")


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", GERMAN),
        ("cp1252", "L’été dernier, le garçon a mangé des crêpes à Noël; ça coûte 5 €."),
        ("cp1252", "free claim winner txt £1000"),
        ("mac_roman", GERMAN),
        ("cp850", GERMAN),
        ("cp1250", "Zażółć gęślą jaźń, powiedział wójt. Święta będą później."),
        ("iso8859_2", "Zażółć gęślą jaźń, powiedział wójt. Święta będą później."),
        ("cp1254", "İstanbul'da güneşli bir gün, çocuklar oynuyor, şeker yiyorlar."),
        ("cp1251", "Привет, мир! Сегодня хорошая погода, и мы идём гулять."),
        ("koi8_r", "Привет, мир! Сегодня хорошая погода, и мы идём гулять."),
        ("cp866", "Привет, мир! Сегодня хорошая погода, и мы идём гулять."),
        ("cp1253", "Καλημέρα κόσμε, σήμερα ο καιρός είναι καλός."),
        ("cp1255", "שלום עולם היום מזג האוויר נעים מאוד"),
        ("cp1256", "اليوم الطقس جميل ونحن نذهب إلى الحديقة"),
        ("cp874", "วันนี้อากาศดีมาก เราไปเดินเล่น"),
        ("gb18030", "今天天气很好，我们去公园散步。这个产品质量不错，推荐购买。"),
        ("big5", "今天天氣很好，我們去公園散步。這個產品質量不錯，推薦購買。"),
        ("shift_jis", "今日は天気がいいので、公園を散歩します。"),
        ("euc_jp", "今日は天気がいいので、公園を散歩します。"),
        ("cp949", "오늘은 날씨가 좋아서 공원에서 산책을 합니다."),
        ("utf-16-le", GERMAN),
        ("utf-16-be", "今天天气很好，我们去公园散步。"),
    ],
)
def test_the_right_one_is_among_the_two_that_are_shown(encoding, text):
    data = f"label,text\nx,{text}\nx,{text}\n".encode(encoding)
    message = question(data)
    number = 1 if encoding.startswith("utf") else 2
    assert f"line {number} is not UTF-8" in message and "as by --encoding" in message
    beginning = "label,text" if number == 1 else f"x,{text}"[:30]
    name = {"shift_jis": "cp932"}.get(encoding, encoding)
    assert beginning in message and f"' as {name}" in message and message.count("' as ") == 2
    read, remark = decode(FILE, data, encoding)
    assert text in read and remark == f", read as {encoding}"


def test_a_few_damaged_bytes():
    """As where a program has cut a text in the middle of a character."""
    data = f"a,{GERMAN}\n".encode() * 40 + b"b,caf\xc3\n"
    message = question(data)
    assert "line 41" in message and "--encoding utf-8;" in message and "'b,caf\ufffd'" in message
    text, remark = decode(FILE, data, "utf-8")
    assert text.splitlines()[-1] == "b,caf\ufffd" and "(1 line, first line 41)" in remark
    wide = (f"a,{GERMAN}\n" * 40).encode("utf-16") + b"\x00\xd8\n\0"
    assert "(1 line, first line 41)" in decode(FILE, wide)[1]
    assert "begins as utf-16 and is not" in question(wide[:200] + b"\x00\xd8\n\0" * 9)
    assert "\udcc3" in decode(FILE, data, BY_ROW)[0]


def test_a_wrong_answer():
    curly = f"a,“{GERMAN}”\n".encode("cp1252")  # control characters in Latin-1
    message = question(curly, "latin-1")
    assert "it is not latin-1 (1 line, first line 1)" in message and "cp1252" in message
    assert "not utf-8" in question(curly, "utf-8")


@pytest.mark.parametrize("data", [bytes(range(256)) * 10, b"PK\x03\x04 and so on", b"\0" * 99])
def test_binary_files(data):
    for encoding in (None, BY_ROW):
        assert "is not text (a binary file?)" in question(data, encoding)
