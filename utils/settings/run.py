"""Flags of the run: what it does, where it is kept, what is logged and reported."""

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import UserError
from ..machine.packages import require
from ..measures.table import OF_SKLEARN, names_in
from ..reporting.trackers import wandb_mode
from ..setting import setting
from .actions import ACTIONS, TRAIN, Action, asked_for
from .config import Config, refuse_beside

run_flag = partial(setting, group="the run and its report", resume="free")
use_flag = partial(setting, group="using a trained model", resume="free")


@dataclass
class RunSettings(Config):
    config: str | None = run_flag(None, "YAML file of settings; the command line takes precedence")
    host_config: str | None = run_flag(
        None,
        "YAML file of folders by host name, as data_dir, cache_dir and output; each process reads "
        "those of its own host",
    )
    output: str | None = run_flag(
        None, "Folder of the run", default_text="runs/<model>-<data>-<time>"
    )
    checkpoint: str | None = run_flag(
        None,
        "At the end of a new run, also write its model to this file, with the ending .safetensors",
    )
    resume: str | None = run_flag(
        None,
        "Resume a run: its folder, or the folder of one checkpoint; without a value, the newest "
        "run. Training goes on from the newest checkpoint; for other uses see --use",
        bare="auto",
    )
    check: bool = run_flag(
        False,
        "Check the devices, the network between the processes, and the installed packages, in two "
        "minutes, and stop; --output names a folder that all nodes should share",
    )
    dry_run: bool = run_flag(
        False,
        "Train a few steps, print how much time, memory and disk space the run will take, draw a "
        "training batch of pictures, and stop without keeping a run",
    )
    save_every: str = run_flag(
        "10m",
        "Interval between checkpoints: a number of steps, of minutes as in 10m, or of epochs as in "
        "1e",
        unit="steps, minutes or epochs",
    )
    checkpoint_hist: int = run_flag(
        3, "Newest checkpoints to keep, in addition to the best one", low=1, unit="checkpoints"
    )
    eval_every: int = run_flag(
        1,
        "Epochs between evaluations, on the validation split if there is one, else on the "
        "test set; 0: only at the end, on the test set",
        low=0,
        unit="epochs",
    )
    time_budget: str | None = run_flag(
        None,
        "Time for the whole command, from its start to the last file: 90s, 10m, 2h or 07:30; "
        "slurm: to the end of the allocation. The steps and the schedule are fitted to it; "
        "--epochs and --max_steps, if given as well, limit them",
    )
    eval_on_start: bool = run_flag(
        False,
        "Also evaluate before the first step, for example to see how good pretrained weights are",
        resume="fixed",
    )
    log_every: int = run_flag(
        20,
        "Steps between log lines; each one makes the host wait for the device",
        low=1,
        unit="steps",
    )
    report: bool = run_flag(
        True,
        "At the end, write report.html, the accuracy of each class and the confusion matrix",
        essential=True,
    )
    metrics: str | None = run_flag(
        None,
        "Measures of every evaluation beside loss and accuracy: for example f1_macro,roc_auc_ovr, "
        "all of docs/measures.md, or FILE.py:NAME, a function of your own",
        many=True,
        resume="free",
        default_text="f1_macro where classes are unequal, top5_accuracy from 100 classes on",
    )
    final_test: bool = run_flag(
        True, "Measure on the test set at the end; without it only on the validation split"
    )
    baseline: bool = run_flag(
        True,
        "Also measure what simple methods reach, at the end, in at most 2 % of the run's time",
    )
    profile: bool = run_flag(False, "Write a trace of a few steps, to be opened in a browser")
    trackers: str = run_flag(
        "tensorboard",
        "What else gets the figures: tensorboard, mlflow, both or none, beside --wandb",
        many=True,
        resume="free",
    )
    wandb: str = run_flag(
        "disabled",
        "Log to Weights & Biases: metrics and settings, never code or environment",
        choices=("online", "offline", "disabled"),
    )
    wandb_project: str = run_flag("training-toolkit", "Project at Weights & Biases")
    wandb_entity: str | None = run_flag(
        None, "User or team at Weights & Biases", default_text="yours"
    )
    wandb_tags: str | None = run_flag(None, "Tags at Weights & Biases", many=True)

    eval_only: bool = use_flag(
        False,
        "Evaluate the checkpoint named by --resume, or the weights named by --pretrained, on the "
        "test set, and stop",
    )
    eval_data: str | None = use_flag(
        None,
        "Evaluate the model named by --resume on all labelled samples of other data, which have "
        "its classes or some of them: a folder or list of pictures, or a table of texts",
    )
    use: str | None = use_flag(
        None,
        "Weights that are the model of the run, for its report and whatever is done with it: the "
        "best on the validation split, or the last. A checkpoint that is named by its folder is "
        "itself",
        choices=("best", "last"),
        default_text="best if there is a validation split, else last",
    )
    predict: str | None = use_flag(
        None, "Classify new files, given a file or a folder, with the model named by --resume"
    )
    predictions: str | None = use_flag(
        None,
        "CSV file for the predictions",
        default_text="predictions.csv in the run's folder",
        essential=True,
    )
    export: str | None = use_flag(
        None,
        "Write the model named by --resume for use elsewhere, with classes and normalisation",
        choices=("onnx", "safetensors"),
    )

    @classmethod
    def implied(cls, given, say):
        if file := given.get("checkpoint"):
            copy = copy_path(file)
            for path in filter(Path.exists, (Path(file), copy)):
                raise UserError(
                    f"--checkpoint {file}: {path} is there: --pretrained FILE starts from its "
                    "weights, --resume RUN goes on with a run; a new run needs another name"
                )
            say(
                f"note: --checkpoint {file}: nothing is pickled; the run's folder has all that is "
                f"saved, {copy} will have a copy of the model; the settings of the elastic DDP "
                "manual are in recipes/manual_transfer.yaml"
            )
        return super().implied(given, say)

    def ineffective(self):
        yield from super().ineffective()
        if self.wandb == "disabled":
            yield ("wandb_project", "wandb_entity", "wandb_tags"), "--wandb is disabled", "wandb"
        asked = asked_for(vars(self))
        for action in (action for action in ACTIONS if action not in asked):
            yield action.options, f"it belongs to --{action.name}", action.name
        for action in (action for action in asked if not action.trains):
            yield from action.ineffective()
        if self.use and Path(self.resume or "").parent.name == "checkpoints":
            yield "use", "--resume names a checkpoint", "resume"
        if self.eval_every == 0:
            yield "eval_on_start", "--eval_every 0 makes no evaluations", "eval_every"
        if self.time_budget is not None:
            yield "epochs_for_sched", "the schedule ends with --time_budget", "time_budget"
        for action in (action for action in asked if action.trains):
            yield from action.ineffective()

    def validate(self):
        super().validate()
        chosen = [action for action in asked_for(vars(self)) if not action.trains]
        if len(chosen) > 1:
            raise UserError(f"--{chosen[0].name} and --{chosen[1].name}: give only one of them")
        if chosen and chosen[0].needs_run and self.resume is None:
            by_weights = chosen[0].takes_weights and self.eval_data is None
            other = ", or its weights by --pretrained" if by_weights else ""
            name = "eval_data" if self.eval_data else chosen[0].name
            if self.pretrained is None or not by_weights:
                raise UserError(
                    f"--{name} needs a trained model: name its run by --resume RUN{other}"
                )
        if self.early_stop_patience is not None:
            self._need_evaluations("--early_stop_patience")
        if self.sched == "plateau":
            self._need_evaluations("--sched plateau")
        if not self.final_test:
            self._need_evaluations("--no_final_test")
        for flag, names in ("best_by", [self.best_by]), ("metrics", names_in(self.metrics)):
            if asked := OF_SKLEARN.intersection(names):
                require(f"--{flag} {asked.pop()}", "scikit-learn")
        save_interval(self.save_every)
        if self.time_budget is not None and self.action.trains:
            budget_seconds(self.time_budget)
            refuse_beside(
                "--time_budget",
                [
                    ("--strategy local", self.trains_locally, "its rounds are planned before"),
                    ("--mixup auto", self.mixup == "auto", "it measures at times planned before"),
                ],
            )
        if self.export == "onnx":
            require("--export onnx", "onnx", "onnxscript")
        trackers = {*self.trackers.split(",")}
        if not (trackers <= {"tensorboard", "mlflow"} or trackers == {"none"}):
            raise UserError(f"--trackers {self.trackers}: take tensorboard, mlflow, both, or none")
        if self.action is TRAIN and "mlflow" in trackers:
            require("--trackers mlflow", "mlflow")
        if self.action is TRAIN and wandb_mode(self.wandb, lambda note: None) != "disabled":
            require(f"--wandb {self.wandb}", "wandb")

    @property
    def action(self) -> Action:
        """What is done with the run."""
        return asked_for(vars(self))[0]

    def _need_evaluations(self, flag: str) -> None:
        """Raises UserError if nothing is evaluated. These flags also need a validation split;
        `make_plan` checks that, once the data are loaded."""
        if self.eval_every == 0:
            raise UserError(f"{flag} needs evaluations, and --eval_every 0 makes none")


def copy_path(file: str) -> Path:
    """Where --checkpoint FILE writes the model: model.pth -> model.safetensors, but model_lr0.1 ->
    model_lr0.1.safetensors. Raises UserError if it names no file."""
    path = Path(file)
    if path.name in ("", ".."):
        raise UserError(f"--checkpoint {file}: give the name of a file, such as model.safetensors")
    stem = path.stem if path.suffix[1:].isalpha() else path.name  # .1 is no ending
    return path.with_name(f"{stem}.safetensors")


def budget_seconds(text: str) -> float | None:
    """What `--time_budget` says; None: until the end of the allocation. Raises UserError."""
    if text == "slurm":
        if not os.environ.get("SLURM_JOB_END_TIME", "").isdecimal():
            raise UserError(
                "--time_budget slurm: SLURM_JOB_END_TIME, the end of an allocation, is not set "
                "here; give a time, such as 2h"
            )
        return None
    value = 0.0
    if re.fullmatch(r"\d+(\.\d+)?[smh]", text):
        value = float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
    elif re.fullmatch(r"(\d+:)?\d+:[0-5]\d", text):
        for part in text.split(":"):
            value = 60 * value + int(part)
    if not value:
        raise UserError(
            f"--time_budget {text}: a time such as 90s, 10m, 2h, 07:30 (minutes and seconds) or "
            "1:30:00, or slurm"
        )
    return value


def save_interval(text: str, steps_per_epoch: int = 1) -> tuple[int | None, float | None]:
    """(steps, None) or (None, seconds): what `--save_every` says. Raises UserError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("m", "e") else (text, "")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or not (unit or value.is_integer()):
        raise UserError(
            f"--save_every {text}: a number of steps such as 500, of minutes as in 10m, or of "
            "epochs as in 1e"
        )
    if unit == "m":
        return None, value * 60
    return max(1, round(value * steps_per_epoch)) if unit else int(value), None
