"""What --help prints: one screen; all flags (--help all); or those that a word finds."""

import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from .. import __version__
from ..errors import UserError
from .aliases import ALIASES
from .values import choices_of, type_of, values_text

# What the first screen says of the flags that one needs first, where an entry has them.
FIRST = {
    "the data": {
        "data_dir": "folder of the data; may stand alone, as the first word",
        "dataset": "built-in or downloaded data; csv: your own tables and lists",
        "train_file": "table of texts to train on, with --dataset csv",
        "text_columns": "columns with text, if they are not found",
        "label_column": "column with the class, if it is not found",
        "test_fraction": "part that is held out as test set, if there is none",
        "val_fraction": "part of the training data that is held out to choose by",
        "image_size": "side in pixels to which pictures are resized",
    },
    "the model": {
        "model": "its name, or FILE.py:CLASS of your own; `--model list` lists timm's",
        "depth": "layers of the ResNet",
        "layers": "layers of the Transformer",
        "pretrained": "start from trained weights",
    },
    "the training": {
        "time_budget": "time for everything, such as 10m or 2h",
        "epochs": "passes over the training data",
        "batch_size": "samples in a step of one process",
        "optimizer": "what takes the steps, such as sgd, adamw, muon or ngd",
        "lr": "peak learning rate",
        "mixup": "mix samples: fixed, auto or meta",
        "config": "a recipe: a YAML file of settings, such as those of recipes/",
        "output": "folder of the run",
        "dry_run": "say what the run will take, and stop",
    },
    "with a trained model": {
        "resume": "go on with this run, the newest by default; or use it as below",
        "predict": "classify these new files",
        "eval_data": "measure it on other labelled data",
        "export": "write it for use elsewhere",
    },
}

FEW = 30  # flags, which need no first screen
ALL = "--help all: all {} flags, with their units, ranges and defaults"


def asked_help(argv: Sequence[str]) -> str | None:
    """The word after --help, "" if there is none; None: it is not asked for."""
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            following = argv[place + 1 :]
            is_word = following and (following[0][:1] != "-" or len(following) == 1)
            return following[0] if is_word else ""
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def help_text(
    known: Mapping[str, dataclasses.Field], text: str, program: str, word: str, listing: Callable
) -> str:
    """What --help `word` prints. Raises UserError if the word finds no flag.

    Args:
        text: what the program does, in a line, and then, perhaps, examples.
        listing: (settings) -> the text with everything on each of them.
    """
    if word == "all" or (not word and len(known) < FEW):
        return listing(known)
    if word:
        found = {name: field for name, field in known.items() if _has(field, word.lower())}
        if not found:
            raise UserError(f"--help {word}: no flag has this word; --help all lists all flags")
        return f"{listing(found)}\n{ALL}\n".format(len(known))
    line, _, examples = text.partition("\n")
    lines = [f"usage: {program} [--flag value ...]", "", line]
    if examples.strip():
        lines += ["", *(f"  {example}" for example in examples.strip().splitlines())]
    for heading, flags in FIRST.items():
        lines += ["", f"{heading}:"]
        lines += [f"  --{name:14} {words}" for name, words in flags.items() if name in known]
    lines += [
        "",
        ALL.format(len(known)),
        "--help WORD: the flags with WORD in their names or texts, such as --help crop",
    ]
    return "\n".join(lines) + "\n"


def _has(field: dataclasses.Field, word: str) -> bool:
    names = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
    flag = word.lstrip("-").replace("-", "_")
    texts = about(field).lower(), field.metadata["group"]
    return any(flag in name for name in names) or any(word in text for text in texts)


def version(program: str) -> str:
    """What --version prints."""
    torch = metadata.version("torch")
    return f"{program} {__version__}, Python {platform.python_version()}, PyTorch {torch}\n"


def about(field: dataclasses.Field) -> str:
    """What a setting does, its values, unit and default."""
    meta, default = field.metadata, field.default
    words = {None: "none", True: "on", False: "off"}
    shown = words[default] if default is None or isinstance(default, bool) else default
    parts = [values_text(field), meta["unit"], f"default: {meta['default_text'] or shown}"]
    if type_of(field)[0] in (bool, str) and not choices_of(meta):
        del parts[0]
    return f"{meta['help']} ({'; '.join(filter(None, parts))})"
