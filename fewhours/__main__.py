"""Trains a classifier of pictures or texts, from what lies in a folder or a table.

fewhours my_pictures --time 10m               a folder for each class
fewhours tickets.csv --time 10m               a table with a text and its class in each row
fewhours --resume                             go on with the newest run
fewhours --resume runs/my_run --predict new_pictures

fewhours resnet50|vit|transformer ...         train a model of your choice: --help lists the flags
fewhours tune resnet50|vit|transformer ...    search settings for it
fewhours tune train DATA ...                  search around what is chosen for a folder or table
fewhours launch ENTRY|DATA ...                on all GPUs, in NPROC processes or on several nodes
fewhours compare RUN RUN ...                  compare runs on one page
fewhours ensemble RUN RUN ...                 use them as one classifier
fewhours pack FOLDER --output SHARDS          pack a folder of pictures into tar shards

A folder with the name of a command is called ./NAME.
"""

import sys

from utils.entry import end_process
from utils.launch.environment import command_start
from utils.place import ENTRIES, import_entry
from utils.start import command

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Carries out the command; returns its exit code. `argv`: its words; None: those of the
    process, which it then ends."""
    if argv is None:
        end_process(main(sys.argv[1:]))
    name, words = (argv[0], argv[1:]) if argv else ("", [])
    if _is_entry(name):
        entry = import_entry(f"{name}_test")
        sys.argv[0] = str(entry.__file__)  # --help names it, and --gpu_ids starts it again
        return entry.main(words, command_start())
    if name in COMMANDS:
        return COMMANDS[name](words)
    return command.main(argv, __doc__ or "")


def _is_entry(name: str) -> bool:
    return name.isidentifier() and (ENTRIES / f"{name}_test.py").is_file()


def _tune(words: list[str]) -> int:
    from tuning.entry import main

    return main(words)


def _launch(words: list[str]) -> int:
    from utils.launch.launcher import main

    name = words[0] if words else "-"
    if name.startswith("-") or name.endswith(".py") or _is_entry(name):
        return main(words)
    return command.main(words, "", lambda entry, flags, _: main([f"{entry}.py", *flags]))


def _compare(words: list[str]) -> int:
    from utils.reporting.compare import main

    return main(words)


def _ensemble(words: list[str]) -> int:
    from .ensemble import main

    return main(words)


def _pack(words: list[str]) -> int:
    from utils.data.images.pack import main

    return main(words)


COMMANDS = {
    "tune": _tune, "launch": _launch, "compare": _compare, "ensemble": _ensemble, "pack": _pack,
}  # fmt: skip

if __name__ == "__main__":
    main()
