"""train.py: what it is given becomes an entry's command line, which is printed and carried out."""

import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError, one_line
from ..machine.packages import mendable
from ..place import PACKAGE, as_called, import_entry
from ..reporting.run_folder import RUNS, find_run
from ..settings.config import parse
from ..settings.help import version
from ..settings.run import budget_seconds
from ..settings.values import canonical_name
from .detect import Found, detect

ENTRIES = {"pictures": "resnet50_test", "texts": "transformer_test"}
NAMED = "vit_test"  # of --model, but for ResNets
TIME = "10m"  # unless something else says how long
LENGTHS = ("time_budget", "epochs", "max_steps")
COMPLETE = ("config", "resume")  # settings that say all that could be chosen
# Where flags alone are given, but for those that name data or are not the manual's, they are those
# of the manual for elastic DDP, whose script is called train.py, too.
MANUAL = "recipes/manual_transfer.yaml"  # found from any folder
NOT_MANUAL = {"config", "dataset", "data_dir", "train_file", "time_budget"}


def start_entry(name: str, words: list[str], started: float) -> int:
    """Trains in this process; returns the exit code of the entry."""
    return import_entry(name).main(words, started)


def main(
    argv: list[str], text: str, act: Callable[[str, list[str], float], int] = start_entry
) -> int:
    """Trains on what the first word names, or goes on with a run; returns the exit code of an
    entry. `text` says in a line and examples what this does; `act` does it."""
    started = time.monotonic()
    if argv[:1] == ["--version"]:
        print(version("fewhours" if PACKAGE else "train.py"), end="")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        lines = [text.strip(), "", "All flags of these may follow, and win over what is chosen:"]
        lines += [f"python {name}.py --help" for name in (*ENTRIES.values(), NAMED)]
        print(as_called("\n".join(lines)))
        return 0 if argv else 2
    try:
        entry, words = as_entry(argv)
    except (UserError, ModuleNotFoundError) as error:
        print(f"error: {one_line(str(mendable(error) or error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return act(entry, words, started)


def as_entry(argv: list[str]) -> tuple[str, list[str]]:
    """(module of the entry, its command line) that train.py stands for; run_distributed.sh starts
    that. Raises UserError."""
    given = _given(argv)
    if not (argv and argv[0]) or argv[0].startswith("-"):  # "": a variable that is not set
        if argv[:1] not in ([], [""]) and not {"resume", *NOT_MANUAL} & given:
            words = ["--config", MANUAL, *argv]
            entry = ENTRIES["pictures"]
            command = as_called(f"python {entry}.py {shlex.join(words)}")
            print(f"no data are named, so as in the manual for elastic DDP: {command}", flush=True)
            return entry, words
        if "resume" not in given:
            raise UserError(
                "the first word names the data: python train.py my_pictures, python train.py "
                "tickets.csv, or python train.py shapes to try it"
            )
        return _entry_of_run(argv), argv
    entry, of_data, flags, words = choose(argv, lambda name: import_entry(name).Settings, TIME)
    words = [*of_data, *_spelled(flags), *words]
    if not {*COMPLETE} & given:
        print(f"{as_called(f'python {entry}.py')} {shlex.join(words)}", flush=True)
    return entry, words


def choose(
    argv: list[str], settings_of: Callable[[str], Any], time: str | None
) -> tuple[str, list[str], dict[str, object], list[str]]:
    """What follows from the data that the first word names, which is printed with its reasons.

    Args:
        settings_of: name of an entry -> the class of settings that the other words are flags of.
        time: of a run, where they do not say how long; None: as long as it needs.
    Returns:
        (module of the entry, words that name the data, chosen settings, the user's words).
        Raises UserError.
    """
    given = _given(argv)
    found, words = detect(argv[0]), argv[1:]
    entry, words = _entry_for(found, words)
    of_data = _spelled(found.flags | _test_set(found, given))
    settings, _ = parse(settings_of(entry), [*of_data, *words], "")
    if {*COMPLETE} & given:
        return entry, of_data, {}, words
    from .facts import facts_of  # imports PyTorch
    from .rules import BEFORE, Machine, chosen, kind_of, lacking

    facts = facts_of(settings)
    print(f"{found.words}: {facts.in_words(found.kind)}")
    flags: dict[str, object] = {}
    seconds = budget_seconds(time) if time and not {"epochs", "max_steps"} & given else None
    if settings.time_budget is not None:
        seconds = budget_seconds(settings.time_budget)
    machine = Machine.here(settings.device, seconds, settings.precision)
    has_encoder = found.kind == "texts" and settings.encoder is not None
    kind, model = kind_of(found.kind, facts, machine, given, has_encoder)
    if (note := lacking(kind, facts, given)) is not None:
        print(f"  note: {note}")
    rules = [(model, BEFORE[found.kind])] if model else []
    rules += chosen(kind, facts, machine, given)
    plans_steps = settings.mixup == "auto" or settings.trains_locally  # which a time cannot change
    if time and not ({*LENGTHS} & given or plans_steps):
        rules.append(({"time_budget": time}, "--time says how long, in all"))
    for own, why in rules:
        print(f"  {' '.join(_spelled(own))}: {why}")
        flags |= own
    if model and found.kind == "pictures":
        entry = NAMED
    return entry, of_data, flags, words


def _given(argv: list[str]) -> set[str]:
    """Names of the settings that are given."""
    return {canonical_name(word.split("=")[0]) for word in argv if word.startswith("-")}


def _entry_for(found: Found, words: list[str]) -> tuple[str, list[str]]:
    """The entry that has the user's --model, and the words as that takes them."""
    entry = ENTRIES[found.kind]
    for place, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if canonical_name(name) != "model" or found.kind == "texts":
            continue
        end = place + (1 if is_joined else 2)
        value = value or next(iter(words[place + 1 : end]), "")
        if resnet := re.fullmatch(r"resnet(18|34|50|101|152)", value):
            return entry, [*words[:place], "--depth", resnet[1], *words[end:]]
        return NAMED, words
    return entry, words


def _test_set(found: Found, given: set[str]) -> dict[str, str]:
    """A fifth of a table is held out where no test set is named."""
    if "train_file" not in found.flags or {"test_file", "test_fraction"} & {*given, *found.flags}:
        return {}
    return {"test_fraction": "0.2"}


def _entry_of_run(argv: list[str]) -> str:
    """The entry that has started the run that --resume names."""
    at = next(i for i, w in enumerate(argv) if canonical_name(w.split("=")[0]) == "resume")
    value = argv[at].partition("=")[2] or next(iter(argv[at + 1 : at + 2]), "-")
    if value.startswith("-") or value == "auto":
        configs = sorted(RUNS.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        if not configs:
            raise UserError(f"--resume: there is no run below {RUNS}/; name one: --resume FOLDER")
        run = configs[-1].parent
    else:
        run = find_run(value, None, "")
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise UserError(f"--resume {run}: there is no config.yaml, so it is no run") from None
    script = text.partition("\n")[0].removeprefix("# ").strip()
    if script == "fewhours.fit":
        raise UserError(f"--resume {run}: only fewhours.fit, given its model and data, can go on")
    return Path(script).stem


def _spelled(flags: dict) -> list[str]:
    """As words of a command line."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append("false" if value is False else str(value))
    return words
