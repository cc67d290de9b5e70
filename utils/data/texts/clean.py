"""Cleans text that was scraped from the web: entities, markup, links, stray backslashes.

AG News has all of them, and many of its entities have a space in place of their ampersand:
`Bush #39;s`, `said  quot;yes quot;`, `AT amp;T`. What only looks like markup (`5 < 6 and 7 > 3`,
`<AAPL.O>`, `R&D`) stays.
"""

import html
import re
from html.entities import html5

# One pass can uncover what the next has to clean (`&amp;lt;b&amp;gt;` -> `&lt;b&gt;` -> `<b>`).
# The limit is for hostile texts, which could ask for thousands.
_PASSES = 20

# Entities that are recognised without their ampersand; none is a common English word.
_BROKEN = "quot|amp|lt|gt|nbsp|apos|hellip|mdash|ndash|lsquo|rsquo|ldquo|rdquo"
_ENTITY = re.compile(
    r"&(#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});"
    rf"|( {{0,2}})(?<![\w&#;])(#[0-9]{{2,5}}|#[xX][0-9a-fA-F]{{2,5}}|{_BROKEN});(?=(\w?))"
)

_TAGS = (
    "a|abbr|address|article|aside|b|big|blockquote|body|br|caption|center|cite|code|div|dl|dt|dd|"
    "em|embed|figure|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|label|li|"
    "link|map|meta|nobr|object|ol|option|p|param|pre|script|section|small|span|strike|strong|"
    "style|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul|wbr"
)
# Attributes of a tag must begin with `name=`, so that `<b and c>` is not taken for one.
_MARKUP = re.compile(
    rf"</?(?:{_TAGS})\s*/?>|<(?:{_TAGS})\s+[\w:-]{{1,40}}\s*=[^<>]*>|<!--[^<>]*-->",
    re.IGNORECASE,
)
_LINK = re.compile(r"\b(?:(?:https?|ftp)://|www\.(?=\w))[^\s<>\"'()]+", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")

_APOSTROPHES = "'\N{RIGHT SINGLE QUOTATION MARK}"
_QUOTES = '"\N{RIGHT DOUBLE QUOTATION MARK}'


def clean_text(text: str) -> str:
    """The text without markup and links, with entities decoded, on one line.

    Backslashes (AG News has them in place of line ends) and control characters become spaces, and
    each run of white space becomes one space. Cleaning a second time changes nothing. The result
    may be empty.
    """
    for _ in range(_PASSES):
        before = text
        text = _CONTROL.sub(" ", text)
        if ";" in text:
            text = _ENTITY.sub(_character, text)
        if "<" in text:
            text = _MARKUP.sub(" ", text)
        if "://" in text or "www." in text.lower():
            text = _LINK.sub(" ", text)
        text = " ".join(text.split())
        if text == before:
            break
    return text


def _character(match: re.Match) -> str:
    """What an entity stands for; an unknown entity stays as it is.

    A space before an entity that lacks its ampersand may stand in for the ampersand. Of two spaces
    one is dropped; a single one is dropped if the character belongs to the word before it.
    """
    whole, spaces, broken, follower = match.groups()
    if whole is not None:
        if whole[0] != "#" and f"{whole};" not in html5:
            return match[0]
        return html.unescape(match[0])
    character = html.unescape(f"&{broken};")
    if len(spaces) == 2:
        return " " + character
    joined = (
        character in _APOSTROPHES
        or (character in _QUOTES and not follower)
        or (character == "&" and follower)
    )
    return character if joined else spaces + character
