"""Fields of a CSV file, safe for spreadsheets."""

import os

# A cell that begins with one of these is a formula for spreadsheets, which can fetch and run
# things: OWASP, "CSV injection".
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def quoted(text: str) -> str:
    """A field of a CSV file: RFC 4180."""
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def safe_path(path: str) -> str:
    """The same file, under a name that is no formula."""
    return os.path.join(".", path) if path.startswith(_FORMULA) else path


def safe_text(text: str) -> str:
    """Text that is no formula; a number is none."""
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
