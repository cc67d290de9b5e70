"""Flags of a search, in addition to those of the entry that it tunes."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from utils.errors import UserError
from utils.setting import setting
from utils.settings import TrainSettings
from utils.settings.actions import ACTIONS
from utils.settings.config import Config, changed
from utils.settings.data import check_subset

GROUP = "tuning"
tuning_flag = partial(setting, group=GROUP)
# Flags that mean something else than in the entry script, which a search reads as these others:
# --epochs is of a trial, and --recipe_epochs is the script's --epochs.
READ_AS = {
    "epochs": "trial_epochs",
    "epoch": "trial_epochs",
    "e": "trial_epochs",
    "num_train_epochs": "trial_epochs",
    "subset": "trial_subset",
    "val_fraction": "trial_val_fraction",
    "recipe_epochs": "epochs",
}
# Flags of the entry script that a search refuses, and why.
REFUSED = {
    "resume": "the same command continues a search",
    "max_steps": "the length of a trial is --epochs",
    "time_budget": "--timeout is the time limit of a search",
    "steps_per_epoch": "trials train on parts of the data",
    "epochs_for_sched": "a schedule spans the epochs of its trial",
    "distributed": "a trial is one process; --jobs trains several at once",
    **dict.fromkeys(("checkpoint", "dry_run", "profile"), "it belongs to a single run"),
    **{action.name: "it belongs to a trained model" for action in ACTIONS if not action.trains},
    "check": "give it to the entry script",
}
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass
class TuningFlags(Config):
    trial_epochs: int | None = tuning_flag(
        None,
        "Epochs of a trial's last stage; in files and messages trial_epochs",
        low=1,
        unit="epochs",
        default_text="a fifth of the recipe's, from 3 to 9",
    )
    trial_subset: float | None = tuning_flag(
        None,
        "Training data of a trial's last stage: a fraction up to 1, or a number of samples; in "
        "files and messages trial_subset",
        above=0,
        default_text="0.2 of the training data, or of the part that --config trains on",
    )
    trial_val_fraction: float | None = tuning_flag(
        None,
        "Fraction of the training data on which trials are scored, the same for all; in files and "
        "messages trial_val_fraction",
        above=0,
        below=1,
        default_text="that of --config, else 0.2; unless the data set has a validation split",
    )
    trials: int | None = tuning_flag(
        None,
        "Trials of the whole study, including the default recipe", low=1,
        unit="trials", default_text="30; with --sampler grid all of its points",
    )  # fmt: skip
    timeout: str | None = tuning_flag(
        None,
        "Time limit of this command, with the confirmation at its end: 90s, 30m, 2h, or a number "
        "of seconds; the same command later continues the study with a new limit",
        default_text="until all trials are done",
    )
    jobs: int | None = tuning_flag(
        None,
        "Trials at once, each with an equal part of the CPU cores or a GPU of its own",
        low=1,
        unit="trials",
        default_text="one for each GPU; without a GPU one for each core, at most 4",
    )
    sampler: str = tuning_flag(
        "tpe",
        "How settings are proposed; grid takes every combination of the grid points of the space",
        choices=("tpe", "random", "grid"),
    )
    space: str | None = tuning_flag(
        None,
        "YAML file of what is tuned, and in which ranges",
        default_text="the one next to this script, in tuning/",
    )
    params: str | None = tuning_flag(
        None,
        "Tune only these parameters of the space, separated by commas",
        default_text="all that have an effect and no flag of their own here",
    )
    prune: bool | None = tuning_flag(
        None,
        "Train each trial in stages, from few epochs on little data to the full size, and stop "
        "those that are not among the best of a stage",
        default_text="on; off with --sampler grid",
    )
    rungs: int = tuning_flag(3, "Stages of a trial, with --prune", low=2, high=10, unit="stages")
    reduction: int = tuning_flag(
        3,
        "Each stage takes this many times the samples of the one before, and the best 1 in "
        "this many trials reach it",
        low=2,
        high=100,
    )
    confirm: int = tuning_flag(
        2,
        "Further seeds, with which the two best trials and the default recipe are trained and "
        "compared at the end",
        low=0,
        high=100,
        unit="seeds",
    )
    recipe_batch_size: int | None = tuning_flag(
        None,
        "Batch size of the resulting recipe, with the learning rate scaled by a stated rule",
        low=1,
        unit="samples",
        default_text="--batch_size, that of the trials",
    )
    output: str | None = changed(
        TrainSettings,
        "output",
        help="Folder of the study; give the same folder to continue the study",
        default_text="runs/tuning-<model>-<data>",
    )

    @classmethod
    def implied(cls, given, say):
        """The scripts that these replace always mix, so their --alpha has no switch beside it."""
        implied = super().implied(given, say)
        if "alpha" not in given or "mixup" in given:
            return implied
        say(f"note: --mixup fixed, since --alpha {given['alpha']:g} is given")
        return implied | {"mixup": "fixed"}

    def validate(self):
        super().validate()
        for name, why in REFUSED.items():
            if getattr(self, name):
                raise UserError(f"--{name} cannot be used in a search: {why}")
        check_subset(self.trial_subset)
        if self.trial_epochs is None:
            self.trial_epochs = min(self.epochs, max(3, min(9, round(self.epochs / 5))))
        if self.trials is None and self.sampler != "grid":
            self.trials = 30
        if self.prune is None:
            self.prune = self.sampler != "grid"
        seconds(self.timeout)


def for_trials(argv: list[str]) -> list[str]:
    """The command line with the flags of READ_AS replaced.

    Raises:
        UserError: --resume is given; `parse` would read the run before it checks any other flag.
    """
    if any(word.split("=")[0] in ("--resume", "-r") for word in argv):
        raise UserError(f"--resume cannot be used in a search: {REFUSED['resume']}")

    def replaced(word: str) -> str:
        word = re.sub(r"^-e(?=\d)", "-e=", word)  # -e5
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").replace("-", "_") if name.startswith("-") else ""
        return f"--{READ_AS[plain]}{equals}{value}" if plain in READ_AS else word

    return [replaced(word) for word in argv]


def listed(known: Mapping[str, dataclasses.Field]) -> dict[str, dataclasses.Field]:
    """The flags as `--help` lists them: those of a search first, under the names of READ_AS that
    users give; without those that a search refuses."""
    shown = {name: flag for flag, name in reversed(READ_AS.items())}
    hidden = {*READ_AS, *REFUSED} | {n for a in ACTIONS if not a.trains for n in a.options}
    flags = []
    for name, field in known.items():
        if name in shown or name not in hidden:
            flags.append(copy.copy(field))
            flags[-1].name = shown.get(name, name)
        if name == "epochs":
            flags[-1].metadata = field.metadata | {  # type: ignore[assignment]  # a mapping
                "group": GROUP,
                "help": "Epochs of the resulting recipe",
                "default_text": f"those of --config, else {field.default}",
            }
    flags.sort(key=lambda flag: flag.metadata["group"] != GROUP)  # keeps the order otherwise
    return {flag.name: flag for flag in flags}


def seconds(text: str | None) -> float | None:
    """ "30m" -> 1800.0; UserError if it is not a time."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"--timeout {text}: a time such as 90s, 30m or 2h")
    return value * UNITS[unit]
