"""Fields of a CSV file that a spreadsheet does not run as formulas."""

import os

# A spreadsheet takes a cell that begins with one of these for a formula, which may fetch data or
# start programs: OWASP, "CSV injection".
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def quoted(text: str) -> str:
    """`text` as a field of a CSV file, quoted where it must be (RFC 4180)."""
    if any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def safe_path(path: str) -> str:
    """A path to the same file that is no formula: `./=1.png` for `=1.png`."""
    return os.path.join(".", path) if path.startswith(_FORMULA) else path


def safe_text(text: str) -> str:
    """`text`, after an apostrophe if it would be a formula; a number is not one."""
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
