"""From the command line of a search to its exit code: `python -m tuning.entry resnet50 --flag ...`.

tuning/NAME_tuning.sh starts it with NAME, and so tunes NAME_test.py; with "train" and data, what
train.py chooses for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UserError, one_line
from utils.launch.signals import Signals, StoppedBySignal
from utils.machine.packages import left_out, mendable, require
from utils.place import PACKAGE, as_called, import_entry
from utils.settings.command_line import print_help
from utils.settings.config import fields, parse
from utils.settings.help import asked_help
from utils.start.command import choose

from .flags import GROUP, TuningFlags, for_trials, listed


class Target:
    """What is tuned.

    Args:
        entry: the module of an entry script, with `Settings` and `model_name`.
        space: the YAML of what is tuned unless --space names another.

    Attributes:
        settings_class: the entry's settings.
        search_class: those, and the flags of a search.
        model_name: (settings) -> name of the model, for the folder of the study.
        script: the entry script.
        description: of the search, in a line.
    """

    def __init__(self, entry: Any, space: Path):
        @dataclass
        class Settings(TuningFlags, entry.Settings):
            pass

        self.settings_class, self.search_class = entry.Settings, Settings
        self.model_name, self.script = entry.model_name, Path(entry.__file__).resolve()
        self.space = space
        line = (entry.__doc__ or "").partition("\n")[0]
        is_usual = line.startswith("Trains ")
        trained = line.removeprefix("Trains ") if is_usual else f"{self.script.name}."
        self.description = f"Searches settings for {trained}"


def target_of(name: str) -> Target:
    """The entry script NAME_test.py, with the space beside this file."""
    entry = import_entry(f"{name}_test")
    return Target(entry, Path(__file__).with_name(f"{name}_space.yaml"))


def search(target: Target, argv: list[str], program: str = "%(prog)s") -> int:
    """Runs a search and returns its exit code, like `utils.entry.run_entry`; `program` is what was
    started, for --help."""
    signals = Signals()
    try:
        argv = for_trials(argv)
        if (word := asked_help(argv)) is not None:
            known = listed(fields(target.search_class))
            print_help(known, target.description, program, word or GROUP)
            return 0
        settings, origin = parse(target.search_class, argv, target.description, print)
        require("tuning", "optuna")
        if note := left_out("matplotlib", "plots"):
            print(note, flush=True)
        # Optuna is imported only now: --help and wrong flags answer at once.
        from .search import Search

        Search(target, settings, origin, signals).run()
    except (UserError, OSError, ModuleNotFoundError) as error:
        if (told := mendable(error)) is None:
            raise
        print(f"error: {one_line(told)}", file=sys.stderr)
        return 2
    except StoppedBySignal as stopped:
        print(stopped.line, file=sys.stderr)
        return stopped.exit_code
    return 0


def main(argv: list[str]) -> int:
    """`argv`: the name of an entry, as `target_of` takes it, and flags."""
    name, *flags = argv or [""]
    if name == "train":
        return _search_for_data(flags)
    spaces = Path(__file__).parent.glob("*_space.yaml")
    names = sorted(path.name.removesuffix("_space.yaml") for path in spaces)
    if name not in names:
        known = ", ".join(names)
        what = "fewhours tune" if PACKAGE else "python -m tuning.entry"
        print(f"error: {what} NAME --flag ...: NAME is {known}, or train DATA", file=sys.stderr)
        return 2
    return search(target_of(name), flags, as_called(f"bash tuning/{name}_tuning.sh"))


def _search_for_data(argv: list[str]) -> int:
    """A search that starts from what train.py chooses for the data that the first word names."""
    program = as_called("bash tuning/train_tuning.sh")
    if asked_help(argv) is not None:  # those of texts differ a little
        return search(target_of("resnet50"), argv, f"{program} DATA")
    if not argv or argv[0].startswith("-"):
        print(f"error: {program} DATA --flag ...: what to train on comes first", file=sys.stderr)
        return 2
    try:
        entry, of_data, flags, words = choose(
            for_trials(argv), lambda name: target_of(name.removesuffix("_test")).search_class, None
        )
    except (UserError, ModuleNotFoundError) as error:
        print(f"error: {one_line(mendable(error) or error)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "chosen.yaml")
        recipe.write_text("".join(f"{name}: {json.dumps(v)}\n" for name, v in flags.items()))
        config = ["--config", str(recipe)] if flags else []
        return search(target_of(entry.removesuffix("_test")), [*of_data, *config, *words], program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
