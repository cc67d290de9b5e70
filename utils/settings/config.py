"""Typed settings: a dataclass becomes flags and YAML keys, checked in one place.

A setting is a dataclass field made by `setting(...)` of utils/setting.py. Its value comes from the
last of these that gives one: its default, the run that is resumed, `--config FILE.yaml`,
`--host_config FILE.yaml`, the command line. An unknown flag or key and a value of the wrong type or
out of range are a UserError of one line. A setting that has no effect beside the others is left out
with a line, or refused if it is essential or one of the model's own.

Nothing here imports PyTorch, so `--help` and wrong flags answer at once. jsonargparse and tyro also
make flags of a dataclass, but know no origins of values, other names, or notes on what has no
effect.
"""

import dataclasses
import difflib
import functools
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..place import RECIPES
from .actions import ACTIONS, KEPT_BY_TRAINING, KEPT_WITH_DATA, TRAIN, asked_for
from .aliases import LOCAL
from .command_line import read_command_line
from .elsewhere import names_from_elsewhere, translate
from .values import (
    NOTHING,
    canonical_name,
    convert,
    parts_of,
    short_for,
    spelled_out,
    suggestion,
)

# Settings of one invocation: never saved in a recipe, nor kept by --resume.
INVOCATION_ONLY = (
    *("config", "host_config", "output", "resume", "profile", "distributed"),
    *(n for a in ACTIONS for n in (a.name, *a.options, *a.implied_by) if a is not TRAIN),
)
MODEL = "model"  # the group of a model's own flags, which are essential, too
DEFAULT, FILE, HOST, COMMAND_LINE = "default", "YAML", "host_config", "command line"
IMPLIED = "implied"  # by other settings that are given
PROBED, FASTEST = "auto_batch", "fastest"  # found at the start of the run
# Settings that take each other's place: one on the command line also replaces a recipe's others.
INSTEAD = (
    ("warmup_epochs", "warmup_ratio", "warmup_steps"),
    ("accumulation_steps", "global_batch"),
)


def changed(config_class, name: str, default=..., **metadata):
    """The setting `name` of `config_class` with another default, or other arguments of `setting`,
    for a class derived from it."""
    before = fields(config_class)[name]
    default = before.default if default is ... else default
    new = before.metadata | {"default": default} | metadata
    return dataclasses.field(default=default, metadata=new)


class Config:
    """Base of an entry's settings: a dataclass whose fields are all made by `setting`."""

    task = ""  # what is trained on, see utils/tasks/kinds.py
    is_transformer = False  # whether the entry is for Transformers, which decides some defaults

    if TYPE_CHECKING:  # each group of settings is checked against those of the others

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def implied(cls, given: Mapping, say: Callable) -> dict:
        """Settings that follow from those that are given, and are not given themselves; `say` is
        called with a line on each."""
        return {}

    def ineffective(self) -> Iterator[tuple[str | Collection[str], str, str]]:
        """(setting or several, reason, the other setting that is the cause) for those without
        effect."""
        yield from ()

    def without_effect(self) -> dict[str, tuple[str, str]]:
        """{setting without effect: (reason, cause)}, the first that is given for each."""
        reasons: dict[str, tuple[str, str]] = {}
        for names, reason, cause in self.ineffective():
            for name in (names,) if isinstance(names, str) else names:
                reasons.setdefault(name, (reason, cause))
        return reasons

    def validate(self) -> None:
        """Raises UserError if settings contradict each other; sets those whose default depends on
        others."""


def refuse_beside(flag: str, others: Iterable[tuple[str, bool, str]]) -> None:
    """Raises UserError for the first of `others`, (flag, whether it is given, reason), that is
    given beside `flag`."""
    for other, given, reason in others:
        if given:
            raise UserError(f"{other} cannot be combined with {flag}: {reason}")


def _fields_of(config_class) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(config_class)}


fields: Callable[[type], dict[str, dataclasses.Field]] = functools.cache(_fields_of)


def parse(config_class, argv: list[str], description: str, say: Callable = lambda line: None):
    """Settings from a command line.

    Args:
        say: called with a line for each setting that has no effect and is left out.
    Returns:
        (settings, origin): an instance of `config_class` and, for each setting, where its value
        came from.
    """
    known = fields(config_class)
    typed = read_command_line(known, argv, description, say)
    recipe = typed.get("config")
    from_file = read_yaml(config_class, Path(recipe), say, typed) if recipe else {}
    rules = {*typed, *from_file}
    is_whole = "qsr_power" in rules and {"alpha", "qsr_alpha"} & rules
    if typed.get("optimizer") in LOCAL and not (is_whole or {"sync_rule", "resume"} & rules):
        say(
            f"note: --optimizer {typed['optimizer']}: rounds grow by --sync_rule qsr; defaults of "
            "the QSR repository are --alpha 0, here --sync_rule constant --sync_base H, and "
            "--power 1, here 2"
        )
    as_typed, typed = typed, spelled_out(known, typed, "--", beside=from_file)
    for either in INSTEAD:
        if any(name in typed for name in either):
            from_file = _without(either, from_file)
    values = {name: field.default for name, field in known.items()}
    origin = dict.fromkeys(values, DEFAULT)
    of_host = _read_places(config_class, from_file | typed)
    new, implied = from_file | of_host | typed, {}
    if new.get("resume") is not None:
        run = _find_run(config_class, new)
        of_host.pop("output", None)  # the run goes on in its own folder
        new = from_file | of_host | typed
        saved = _before(config_class) | read_yaml(config_class, run / "config.yaml")
        origins = _read_origins(run / "config.yaml")
        if origins.get("report") == DEFAULT:  # in older runs the default was off
            del saved["report"]
        found = set()  # the command that started the run may be given again
        if new.get("auto_batch"):
            found = {name for name, came in origins.items() if came == PROBED}
        if new.get("precision") == origins.get("precision") == FASTEST and asked_for(new)[0].trains:
            found.add("precision")
        new, from_file, typed = (_without(found, given) for given in (new, from_file, typed))
        spelled_out(known, as_typed, "--", {"strategy": saved.get("strategy")})  # refuses --alpha
        idle = config_class(**(values | saved | new)).without_effect()
        _check_unchanged(config_class, run, saved, _without(idle, new))
        action = asked_for(new)[0]
        of_training = () if action.trains else KEPT_BY_TRAINING
        same_data = action.needs_data and not new.get("eval_data")
        of_data = () if same_data else KEPT_WITH_DATA
        kept = saved.keys() - {*of_training, *of_data}
        values |= {name: saved[name] for name in kept} | {"output": str(run)}
        origin |= {name: came for name, came in origins.items() if name in kept}
        if new["resume"] == "auto":
            new["resume"] = str(run)
    else:
        implied = config_class.implied(new, say)
        new = implied | new
    without_new = dict(values), dict(origin)
    values |= new
    origin |= dict.fromkeys(implied, IMPLIED) | dict.fromkeys(from_file, FILE)
    origin |= dict.fromkeys(of_host, HOST) | dict.fromkeys(typed, COMMAND_LINE)
    settings = config_class(**values)
    for name, (reason, cause) in settings.without_effect().items():
        field = fields(config_class)[name]
        if name not in typed:
            # Kept without a word: a recipe's setting that loses its effect through the command
            # line, or through a setting that no recipe has; its default, which a config.yaml has.
            overruled = cause in typed or cause in INVOCATION_ONLY
            if name not in from_file or overruled or values[name] == field.default:
                continue
        text, meta = f"--{name} has no effect: {reason}", field.metadata
        if meta["essential"] or meta["group"] == MODEL:
            raise UserError(f"{text}; leave it out")
        if name == "qsr_alpha" and cause == "sync_rule" and name in typed and cause not in typed:
            raise UserError(f"{text}; add --sync_rule qsr, or leave it out")
        say(f"note: {text}")
        setattr(settings, name, without_new[0][name])
        origin[name] = without_new[1][name]
    settings.validate()
    return settings, origin


def _without(names: Collection[str], values: Mapping) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def _read_places(config_class, new: Mapping) -> dict:
    """The settings that --host_config gives this host, converted and checked."""
    if new.get("host_config") is None:
        return {}
    from .yaml_file import places_of  # slow to import: only where a file is read

    path, known = Path(new["host_config"]), fields(config_class)
    places = places_of(path, socket.gethostname(), known)
    return {name: convert(known[name], value, f"{path}: {name}") for name, value in places.items()}


def _before(config_class) -> dict:
    """{setting: its value in runs that were started before there was such a setting}, where that is
    not its default."""
    befores = {name: field.metadata["before"] for name, field in fields(config_class).items()}
    return {name: before for name, before in befores.items() if before is not None}


def _find_run(config_class, new: Mapping) -> Path:
    """The folder of the run that is resumed."""
    from ..reporting.run_folder import find_run

    run = find_run(new["resume"], new.get("output"), getattr(config_class, "entry", ""))
    if not (run / "config.yaml").is_file():
        name = "" if new["resume"] == "auto" else f" {new['resume']}"
        raise UserError(
            f"--resume{name}: {run} has no config.yaml, so it is not the folder of a run"
        )
    with open(run / "config.yaml", encoding="utf-8", errors="replace") as file:
        script = file.readline().strip().removeprefix("# ")
    if script.endswith(".py") and script != getattr(config_class, "entry", script):
        raise UserError(f"--resume {run}: this is a run of {script}; give that script the flag")
    return run


def _check_unchanged(config_class, run: Path, saved: Mapping, new: Mapping) -> None:
    """Raises UserError for a new value of a setting that a resumed run must keep."""
    training = asked_for(new)[0].trains
    free = {"free"} if training else {"free", "evaluation"}
    for name, field in fields(config_class).items():
        if field.metadata["resume"] in free or name not in new or name not in saved:
            continue
        if new[name] != saved[name]:
            raise UserError(
                f"--{name} {new[name]}: the run in {run} was started with {saved[name]}, and a "
                "resumed run must keep it; leave the flag out, or start a new run with --output"
            )


def _read_origins(path: Path) -> dict[str, str]:
    """Where the settings of a run came from, by the comments that `to_yaml` has written."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    pairs = [(line.split(":")[0], line.rpartition("  # ")[2]) for line in lines if ":" in line]
    pairs = [(canonical_name(name), came) for name, came in pairs]
    known = (DEFAULT, FILE, HOST, COMMAND_LINE, IMPLIED, PROBED, FASTEST)
    return {name: came for name, came in pairs if came in known}


def read_yaml(config_class, path: Path, say=lambda line: None, beside: Mapping = NOTHING) -> dict:
    """The settings of a YAML file, converted and checked one by one. `say` is called with a note on
    keys that are known from elsewhere; `beside` is what the command line gives."""
    if path.suffix == ".py":
        raise UserError(f"--config {path}: a recipe is a YAML file{_recipe_like(path)}")
    from .yaml_file import read_yaml_file

    if path.parent.name == "recipes" and not path.exists() and (RECIPES / path.name).exists():
        path = RECIPES / path.name
    content = read_yaml_file(path, "--config")
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise UserError(f"--config {path}: 'name: value' lines are needed, one for each setting")
    known, keys, given, told = fields(config_class), {}, {}, []
    names = {*known, *short_for(known), *parts_of(known), *names_from_elsewhere(known)}
    for key, value in content.items():
        name = canonical_name(str(key))
        if name == "config":
            raise UserError(f"{path}: a recipe cannot name another recipe; put its settings here")
        if name in keys:
            raise UserError(f"{path}: {name} is set twice")
        keys[name] = str(key)
        if name in names:
            given[name] = value
        else:
            told.append(f"{key!r}{suggestion(str(key), known)}")
    refused = translate(known, given, lambda n: keys.get(n, n), lambda n: say(f"{n} ({path})"))
    if told := told + [f"{key}: {meaning}" for key, meaning in refused.items()]:
        raise UserError(f"{path}: unknown setting{'s' * (len(told) > 1)} {'; '.join(told)}")
    for name, value in given.items():
        where = f"{path}: {keys.get(name, name)}"
        if name in known:
            given[name] = convert(known[name], value, where)
        elif name in short_for(known) and not isinstance(value, bool):
            raise UserError(f"{where}: {value!r} is not true or false")
    instead = beside.get("optimizer", "ngd" if beside.get("ngd") else None)
    keeps_local = instead is None or instead in LOCAL or "strategy" in beside
    if given.get("optimizer") in LOCAL and not keeps_local:
        given = _without(("optimizer", "alpha"), given)  # the alpha is that of its rounds
    return spelled_out(known, given, f"{path}: ")


def _recipe_like(path: Path) -> str:
    """', such as recipes/...', of the recipe that has nearly this name, if there is one."""
    names = {recipe.stem: f"recipes/{recipe.name}" for recipe in sorted(RECIPES.glob("*.yaml"))}
    wanted = path.stem.replace("-", "_").lower()
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    return f", such as {names[near[0]]}" if near else ""


def to_yaml(settings, origin: Mapping[str, str]) -> str:
    """Every setting with a comment on where it came from, as a recipe for `--config`.

    Settings of one invocation (INVOCATION_ONLY) are commented out.
    """
    import yaml

    lines = []
    for name in fields(type(settings)):
        line = yaml.safe_dump({name: getattr(settings, name)}, allow_unicode=True, width=1000)
        line = f"{line.strip()}  # {origin.get(name, DEFAULT)}"
        lines.append("# " + line.replace("\n", "\n# ") if name in INVOCATION_ONLY else line)
    return "\n".join(lines) + "\n"
