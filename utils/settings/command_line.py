"""Reads a command line: each setting is a flag, with its help, other names and --no_NAME."""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UserError
from ..place import as_called, import_entry
from .aliases import ALIASES, VALUE_NOTES
from .elsewhere import SEVERAL, names_from_elsewhere, translate
from .help import about, asked_help, help_text, version
from .values import (
    canonical_name,
    choices_of,
    convert,
    is_switch,
    parts_of,
    plain_name,
    short_for,
    suggestion,
    type_of,
)

# Modules with the settings of an entry, whose flags a message may name.
ENTRIES = ("resnet50_test", "vit_test", "transformer_test")


def read_command_line(
    known: Mapping[str, dataclasses.Field],
    argv: list[str],
    description: str,
    say: Callable,
    program: str = "%(prog)s",
) -> dict:
    """{setting: converted value}, with the flags of `short_for` and `parts_of` as they are given.
    With --help and --version prints that and exits.

    Args:
        known: the entry's settings, by name.
        description: what the program does, in a line, and then, perhaps, examples.
        say: called with a note on a value that is known from elsewhere.
        program: what is started, for the usage line of --help.
    """
    parser = _parser(tuple(known.values()), description.partition("\n")[0], program)
    if (word := asked_help(argv)) is not None:
        print_help(known, description, program, word)
        raise SystemExit(0)
    if "--version" in argv:
        print(version(_named(program)), end="")
        raise SystemExit(0)
    _refuse_single_hyphens(argv, known)
    typed, unknown = parser.parse_known_args(_with_folder(argv, known))
    given, as_typed = vars(typed), _as_typed(argv, known)
    refused = translate(known, given, lambda name: as_typed.get(name, _flag(name)), say)
    _refuse(unknown, refused, known, argv)
    given = {n: ",".join(v) if isinstance(v, list) else v for n, v in given.items()}
    for name, value in given.items():
        if value == "":  # such as that of a variable that is not set
            raise UserError(f"--{name}: the value is empty; leave the flag out, or give it a value")
    values = {n: convert(known[n], v, as_typed[n]) if n in known else v for n, v in given.items()}
    for name, value in given.items():
        if (note := VALUE_NOTES.get(name, {}).get(str(value).lower())) is not None:
            say(f"note: {as_typed[name]} {value}: {note}")
    return values


def print_help(known: Mapping, description: str, program: str, word: str) -> None:
    """Prints what --help `word` says of these settings, by name; see `read_command_line`."""
    line, name = description.partition("\n")[0], _named(program)

    def listing(some: Mapping) -> str:
        return _parser(tuple(some.values()), line, name).format_help()

    print(as_called(help_text(known, description, name, word, listing)), end="")


def _named(program: str) -> str:
    return program.replace("%(prog)s", Path(sys.argv[0]).name)


def _refuse(unknown: list[str], refused: Mapping, known: Mapping, argv: list[str]) -> None:
    """Raises UserError, one for all, if there are unknown words or flags that are refused, {flag
    and value: what to do instead}."""
    flags = [word.split("=")[0] for word in unknown if re.match("--?[a-zA-Z]", word)]
    told = {flag: _hint(flag, known) for flag in flags}
    told |= {flag: f": {meaning}" for flag, meaning in refused.items()}
    if told:
        end = "" if len(told) == 1 and any(told.values()) else "; see --help"
        text = "; ".join(flag + hint for flag, hint in told.items())
        if any(canonical_name(flag.split()[0]) not in known for flag in told):
            text = f"unknown flag{'s' * (len(told) > 1)} {text}"
        raise UserError(f"{text}{end}")
    if unknown and "data_dir" in known and unknown[0] == argv[0]:
        raise UserError(
            f"{argv[0]!r}: there is no such folder; the first argument may be the data folder, "
            "all others are --name value; see --help"
        )
    if unknown:
        raise UserError(f"{unknown[0]!r} has no flag before it: write --name value; see --help")


@functools.cache  # tests read thousands of command lines
def _parser(settings: tuple[dataclasses.Field, ...], description: str, program: str) -> "_Parser":
    known = {field.name: field for field in settings}
    parser = _Parser(
        usage=f"{program} [--flag value ...]",
        description=description,
        epilog="Every flag can also be set in a YAML file (--config), and may be written with "
        "hyphens instead of underscores. --no_NAME switches an on/off flag off, and the value none "
        "unsets an optional one. " + _other_names(known),
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what is not given is not in the result
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=100),
    )
    groups = {}
    for field in known.values():
        heading = field.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add_flag(groups[heading], field)
        for flag, (name, value) in short_for(known).items():
            if name == field.name:
                text = f"Short for --{name} {value} (default: off)"
                _add_names(groups[heading], [f"--{flag}"], text, dest=flag, action="store_true")
    for flag in parts_of(known):
        _add_names(parser, [f"--{flag}"], argparse.SUPPRESS, dest=flag)
    for flag in sorted(names_from_elsewhere(known)):
        how = {"nargs": "*"} if flag in SEVERAL else {"nargs": "?", "const": ""}
        _add_names(parser, [_flag(flag)], argparse.SUPPRESS, dest=flag, **how)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message.removeprefix('argument ')}; see --help")


def _add_flag(group, field: dataclasses.Field) -> None:
    name, (kind, _), bare = field.name, type_of(field), field.metadata["bare"]
    names = [name] + [alias for alias, target in ALIASES.items() if target == name]
    if kind is bool:
        # `--flag`, `--flag false` and `--no_flag` are all understood.
        how: dict = {"nargs": "?", "const": "true", "metavar": "true|false"}
    else:
        named = kind is str and choices_of(field.metadata)
        how = {"metavar": "NAME" if named else kind.__name__.upper()}
        how |= {"nargs": "?", "const": bare} if bare else {}
        how |= {"nargs": "+"} if field.metadata["many"] else {}
    if kind is bool or is_switch(field.metadata) or (bare and "none" in choices_of(field.metadata)):
        off = [f"--no_{n}" for n in names if len(n) > 1]
        _add_names(group, off, argparse.SUPPRESS, dest=name, action="store_const", const=False)
    flags = [*map(_flag, names), *(f"--{n}" for n in names if len(n) == 1)]  # --e, cut short
    _add_names(group, flags, about(field).replace("%", "%%"), dest=name, **how)


def _add_names(group, names: list[str], text: str, **how) -> None:
    """Adds a flag by these names, with underscores or hyphens. `--help` lists the first one alone;
    its end has the aliases."""
    group.add_argument(names[0], help=text, **how)
    if others := sorted({*names, *map(_hyphens, names)} - {names[0]}):
        group.add_argument(*others, help=argparse.SUPPRESS, **how)


def _hint(flag: str, known) -> str:
    """What an unknown flag may be: "", ": it belongs to ..." or ", did you mean --...?"."""
    return _owners(canonical_name(flag)) or suggestion(flag, known, "--", 0.78)


def _owners(name: str) -> str:
    """ ": it belongs to ..." with the entry scripts that have the setting; "" if there are none."""
    owners = []
    for entry in ENTRIES:
        with contextlib.suppress(ImportError):  # an entry that was copied elsewhere
            of_entry = dataclasses.fields(import_entry(entry).Settings)
            owners += [f"{entry}.py"] * (name in {field.name for field in of_entry})
    return f": it belongs to {' and '.join(owners)}" if owners else ""


def _flag(name: str) -> str:
    return ("-" if len(name) == 1 else "--") + name


def _other_names(known) -> str:
    """The aliases, for the end of `--help`."""
    names = {}
    for alias, name in ALIASES.items():
        if name in known:
            names.setdefault(name, []).append(_flag(alias))
    others = "; ".join(f"--{name}: {' '.join(names[name])}" for name in sorted(names))
    return f"Other names of flags: {others}." if others else ""


def _refuse_single_hyphens(argv: list[str], known: Mapping) -> None:
    """Raises UserError for -lr 0.1, which would be read as -l with the value r."""
    names = {*known, *short_for(known), *parts_of(known), *names_from_elsewhere(known)}
    for word in argv:
        name = word.split("=")[0]
        setting = canonical_name(name)
        if re.match("-[a-zA-Z].", name) and {setting, setting.removeprefix("no_")} & names:
            raise UserError(f"unknown flag {name}, did you mean --{setting}?")


def _with_folder(argv: list[str], known) -> list[str]:
    """A folder as the first word is that of the data, as with timm."""
    if not argv or "data_dir" not in known or not os.path.isdir(argv[0]):
        return argv
    if "data_dir" in map(_setting_of, argv[1:]):
        raise UserError(
            f"{argv[0]}: the data folder is given twice, as the first argument and by --data_dir: "
            "leave one of the two out"
        )
    return ["--data_dir", *argv]


def _setting_of(word: str) -> str:
    """The setting that a word of the command line sets; "" if it is no flag."""
    return canonical_name(word.split("=")[0]) if word.startswith("-") else ""


def _as_typed(argv: list[str], known) -> dict[str, str]:
    """{setting: the flag by which it is given: --NAME, or the alias or other flag that is typed}"""
    typed = {_setting_of(word): word.split("=")[0] for word in argv}
    by_alias = {name: flag for name, flag in typed.items() if plain_name(flag) in ALIASES}
    return typed | {name: by_alias.get(name, f"--{name}") for name in known}


def _hyphens(flag: str) -> str:
    return flag.replace("_", "-")
