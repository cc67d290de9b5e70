"""What the user's own Python files define, named as FILE.py:NAME."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError, one_line


def find(flag: str, place: str, what: str, example: str, fits: Callable[[Any], bool]) -> Any:
    """The object that "path/to/file.py:Name" names. The file may import others from its folder.

    Args:
        flag: begins the message of an error.
        what: a noun for the object; `example`: a name for one; `fits`: whether it is one.

    Raises:
        UserError: there is no such file or object, or the file cannot be imported.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{flag} {place}: there is no file {file}")
    if not name.isidentifier():
        raise UserError(f"{flag} {place}: name the {what} after a colon, as in {file}:{example}")
    written = path.stat()
    try:
        module = _import_file(path.absolute(), written.st_mtime_ns, written.st_size)
    except Exception as error:
        raise UserError(f"{flag} {place}: {file} cannot be imported{where(error, place)}") from None
    found = getattr(module, name, None)
    if not fits(found) and found is not None:
        raise UserError(f"{flag} {place}: {name} is no {what}; name one, such as {example}")
    if not fits(found):
        own = [
            k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        there = f"; it has {', '.join(own)}" if own else ""
        raise UserError(f"{flag} {place}: {file} has no {what} named {name}{there}")
    return found


def attempt(call: Callable[[], Any], what: str, place: str, hint: str) -> Any:
    """Returns `call()`, which calls what `place` names; UserError "`what` failed ...; `hint`"."""
    try:
        return call()
    except Exception as error:
        raise UserError(f"{what} failed{where(error, place)}; {hint}") from None


def contents(settings: Mapping[str, Any]) -> dict[str, str]:
    """{FILE.py:NAME: SHA-256 of the file}, of the settings that name one."""
    texts = ",".join(value for value in settings.values() if isinstance(value, str)).split(",")
    found = [(text, Path(text.rpartition(":")[0])) for text in texts if ".py:" in text]
    return {
        text: hashlib.sha256(path.read_bytes()).hexdigest()
        for text, path in found
        if path.is_file()
    }


def where(error: BaseException, place: str) -> str:
    """ " in line 3: ValueError: text"; the line is one of the user's file, left out if unknown."""
    file, kind = str(Path(place.rpartition(":")[0]).absolute()), type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line, text = f" in line {lines[-1]}" if lines else "", one_line(error, 300)
    return f"{line}: {text}" if text.startswith(kind) else f"{line}: {kind}: {text}"


@functools.cache  # what a file registers elsewhere may be registered only once
def _import_file(path: Path, modified: int, size: int) -> ModuleType:
    """Imports the file unless it was imported as it is (`modified` in ns, `size` in bytes)."""
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
