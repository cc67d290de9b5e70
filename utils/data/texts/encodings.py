"""The encoding of a file's text: known by its bytes, given by --encoding, or asked for."""

import codecs
import re
import string
import unicodedata
from pathlib import Path

from ...errors import UserError
from ...plural import counted

# Of runs started before there was --encoding: a row that is not UTF-8 is a bad row.
BY_ROW = "by_row"
_HEAD_BYTES = 1 << 16  # enough to tell text from binary
_ASKED_LINES = 200
_MOST_DAMAGED = 0.05  # of the lines
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
# The likeliest first, with the characters by which texts of its languages are known.
_ENCODINGS = {
    "cp1252 mac_roman cp850": "äöüÄÖÜßéèêàâçîôûùëïœáíóúñãõåøæÉ’‘“”„–—…€£§°«»",
    "cp1251 koi8_r cp866": "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфёіїє",
    "gb18030": "的一是不了在人有我他这中大来上个国到说们为子和你也时年就那要下以很，。！？、：",
    "cp932 euc_jp": "のにはをたがでてとしれさあいうかるなもこっすくらりまきーンスルトリッ、。",
    "cp949": "이다는을의에가고하지사도로한은그아나어를니들서기리자대라수인시해있보",
    "big5": "的一是不了在人有我他這中大來上個國到說們為子和你也時年就那要下以很，。！？、：",
    "cp1250 iso8859_2": "ąćęłńóśźżčěřšžýáíéúůäöüőű’“”„–…€",
    "cp1254": "ıİşŞğĞçöüÇÖÜ’“”",
    "cp1253": "αοιετσνηυρπκμλςωάέήίόύώ’«»",
    "cp1255": "יוהלאמרתבשנכחדםפקעטןגסצז",
    "cp1256": "اليمونرتبةعدسفهكحقأجشطصخ،",
    "cp874": "านรอกเงมยลวด่้",
}
_CONTROL = re.compile(b"[\x00-\x08\x0e-\x1f]")
_DAMAGE = re.compile("[\x80-\x84\x86-\x9f\ufffd]")  # no text has these
_ODD = ("Cc", "Cn", "Co", "So", "Sm", "No", "Sk")  # categories that are rare in texts
_NO_TEXT = (b"PK\x03\x04", b"\x1f\x8b", b"PAR1", b"%PDF", b"\xd0\xcf\x11\xe0")


def decode(path: Path, data: bytes, encoding: str | None = None) -> tuple[str, str]:
    """(text, remark): the text of the file `path`, whose bytes are `data`, without byte order mark,
    and how it was read, for a note; "" where that goes without saying.

    UTF-8, and UTF-16 and UTF-32 with a byte order mark, are read as such, all others as `encoding`.
    The few bytes that are no characters in it become U+FFFD.

    Raises:
        UserError: `encoding` is needed, is a wrong one, or the file is not text.
    """
    marked = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    data = data.removeprefix(codecs.BOM_UTF8)
    head = data[:_HEAD_BYTES]
    try:
        text = data.decode(marked or "utf-8")
        if marked or not (_is_binary(head, 0.2) or ("2022" in str(encoding) and b"\x1b" in head)):
            return text, ", read as UTF-8" if encoding and not (marked or text.isascii()) else ""
    except UnicodeDecodeError:
        pass
    if encoding == BY_ROW and not (marked or _is_binary(head, 0.05)):
        return data.decode("utf-8", "surrogateescape"), ""
    name = marked or encoding
    if name is None or name == BY_ROW:
        raise _question(path, data)
    text = data.decode(name, "replace")
    lines = text.split("\n")
    damaged = [number for number, line in enumerate(lines, 1) if _DAMAGE.search(line)]
    where = f"({counted(len(damaged), 'line')}, first line {min(damaged, default=0)})"
    if len(damaged) > _MOST_DAMAGED * len(lines):
        if marked:
            raise UserError(
                f"{path} begins as {name} and is not {name} {where}: save it anew, as UTF-8"
            )
        raise _question(path, data, f"it is not {name} {where}; ")
    return text, f", read as {name}" + f", \ufffd for what is not {name} {where}" * bool(damaged)


def _is_binary(head: bytes, most: float) -> bool:
    return head.startswith(_NO_TEXT) or len(_CONTROL.findall(head)) > most * len(head)


def _question(path: Path, data: bytes, why: str = "") -> UserError:
    """Asks for --encoding, with the two likeliest and how a line reads in each."""
    head, every = data[:_HEAD_BYTES], data.split(b"\n")
    bad = [i for i, line in enumerate(every) if "\ufffd" in line.decode("utf-8", "replace")]
    asked = bad[:_ASKED_LINES] or range(len(every))[:_ASKED_LINES]
    sample, encodings = b"\n".join(every[i] for i in asked)[:_HEAD_BYTES], _ENCODINGS
    if wide := _is_binary(head, 0.05):
        sample, asked = head, range(len(head))
        encodings = {"utf-16-le utf-16-be": string.printable}
    elif 2 * len(bad) < sum(not line.isascii() for line in every):
        encodings = {"utf-8": ""} | encodings
    found = []
    for name, common in ((name, encodings[names]) for names in encodings for name in names.split()):
        text = sample.decode(name, "replace")
        judged = [c for c in text if wide or not c.isascii()]
        # That two bytes are a letter of East Asia at all speaks for it.
        good = sum(
            (c in common) + 0.3 * ("\u3000" < c < "\ud800") - (unicodedata.category(c) in _ODD)
            for c in judged
        )
        found.append((name == "utf-8", good / max(len(judged), 1), name, text.split("\n")))
    (_, score, first, read), *others = sorted(found, key=lambda each: each[:2], reverse=True)
    if head.startswith(_NO_TEXT) or (wide and score <= 0):
        return UserError(f"{path} is not text (a binary file?): give a text file")
    *_, second, other = next((each for each in others if each[3] != read), ("", []))
    row = next((i for i, (one, two) in enumerate(zip(read, other, strict=False)) if one != two), 0)
    shown = f"{_excerpt(read[row])} as {first}"
    if other:
        shown += f" and {_excerpt(other[row])} as {second}"
    return UserError(
        f"{path}: {why}line {asked[row] + 1} is not UTF-8: name the file's encoding, as by "
        f"--encoding {first}; the line reads {shown}"
    )


def _excerpt(line: str) -> str:
    """What is around its first character beyond ASCII."""
    found = re.search(r".{0,25}[^\0-\x7f].{0,25}|.{0,50}", line)
    return f"'{''.join(c if c.isprintable() else ' ' for c in found[0]).strip()}'"
