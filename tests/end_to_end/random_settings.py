"""Settings drawn at random from the whole space of an entry: a run of two steps works, or says in
one line why it cannot (exit code 2), never by a traceback."""

import contextlib
import io
import itertools
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from quick_runs import quick

from utils.reporting.plots import draw_curves
from utils.runs import report
from utils.settings.config import fields

OPTIONS = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}
# Settings that are drawn in `make test`; in `make slow`, in `make soak`.
FEW, MANY = 20, 160 if "SOAK" in os.environ else 80
# With SOAK every call draws other settings.
REPEATABLE = "SOAK" not in os.environ
ALWAYS_FIXED = {
    "config", "host_config", "resume", "compile", "dataset", "wandb",
    "wandb_project", "wandb_entity", "wandb_tags",
}  # fmt: skip
# For settings that both entries have.
SHARED_VALUES = {
    "save_every": ["1", "0.001m", "never"],
    "time_budget": ["1m", "0.1s", "07:30", "slurm", "soon"],
    "checkpoint": ["model.pth", "/proc/model.pth"],
    "trackers": ["none", "tensorboard", "nothing"],
    "betas": ["0.9,0.99", "0.9", "x"],
    "milestones": ["1", "0.5,2", "x"],
    "predictions": ["out.csv", "/proc/out.csv"],
    "keep_fp32": ["head", "fc,*bn1", "*", "nothing"],
    "metrics": ["f1", "all", "top3,cohen_kappa", "nothing"],
    "best_by": ["accuracy", "loss", "f1_macro", "auroc", "top2", "nothing"],
    "encoding": ["cp1252", "utf-16-le", "nonsense"],
    "labels": ["classes.csv", "labels.csv", "nowhere.csv"],
    "workers": [0, 1, 2],
    "seed": [0, 7],
    "class_weights": ["balanced", "sqrt", "classes.yaml", "nowhere.yaml", "classes.csv", "x"],
    "loss": ["own_parts.py:loss", "own_parts.py:curve", "nowhere.py:loss"],
    "focal_gamma": [0, 0.5, 2, -1],
    "logit_adjustment": [0, 0.5, 1, 1e6],
    "lookahead_k": [1, 2, 5],
    "epochs": [1, 2, 5],
    "subset": [0.5, 1, 2, 30, 1000],
}
# own_parts.py in the working directory.
OWN_PARTS = """
from torch.nn.functional import cross_entropy

def loss(logits, classes):
    return cross_entropy(logits, classes, reduction="none")

def curve(fraction):
    return 1 - fraction

def augment(pictures, generator):
    return pictures.flip(3)
"""


@dataclass
class Space:
    """The settings of an entry, for data in the working directory, which also has a run `trained`
    and its copy `kept`.

    Args:
        base: always given, so that a run takes a fraction of a second, without network and GPU.
        data: one of these is given, too.
        own_values: of settings whose type does not say what to draw.
        needed: not to be left out: without them a run takes long.
    """

    settings: type
    main: Callable
    base: dict
    data: list[dict]
    own_values: dict[str, list]
    needed: set[str]

    @property
    def drawn(self) -> set[str]:
        return fields(self.settings).keys() - self.base.keys() - ALWAYS_FIXED

    def values(self, name: str):
        """Values of a setting: mostly valid ones, and a few out of range."""
        field = fields(self.settings)[name]
        meta, kind = field.metadata, str(field.type)
        own = SHARED_VALUES | self.own_values
        if name in own:
            return st.sampled_from(own[name])
        if meta["choices"]:
            return st.sampled_from([*meta["choices"], "nonsense"])
        if "bool" in kind:
            return st.booleans()
        low = meta["low"] if meta["low"] is not None else meta["above"] or 0
        high = meta["high"] if meta["high"] is not None else meta["below"]
        if "int" in kind:
            return st.integers(low - 1, low + 3)
        if "float" in kind:
            ends = [low, high if high is not None else 3.0]
            return st.sampled_from([*ends, 0.1, 0.5, 1e-3, 1e6, -1])
        raise AssertionError(f"{name}: how are its values drawn?")

    def random(self):
        """A strategy for settings."""

        @st.composite
        def chosen(draw) -> dict:
            names = st.lists(st.sampled_from(sorted(self.drawn)), max_size=7, unique=True)
            others = {name: draw(self.values(name)) for name in draw(names)}
            resumed = {"resume": "trained"} if draw(st.integers(0, 4)) == 0 else {}
            if resumed and draw(st.booleans()):
                return resumed | {"max_steps": 4} | others
            return self.base | draw(st.sampled_from(self.data)) | others | resumed

        return chosen()

    def run(self, chosen: dict) -> str | None:
        """The line of the error; None if the run worked."""
        shutil.rmtree("run", ignore_errors=True)
        shutil.rmtree("trained", ignore_errors=True)
        shutil.copytree("kept", "trained")
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = self.main(flags(chosen))
        errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) in ((0, 0), (2, 1)), said.getvalue()
        others = ("check", "dry_run", "eval_only", "eval_data", "predict", "export")
        trains = not any(chosen.get(name) for name in others)
        if code == 0 and chosen.get("output") == "run" and trains:
            assert Path("run/summary.json").is_file()
        return errors[0] if errors else None

    def check(self, chosen: dict) -> None:
        """Leaves out what is refused by name, until the rest works or is refused for another
        reason."""
        while (error := self.run(chosen)) is not None:
            named = [n for n in re.findall(r"--(\w+)", error) if n in chosen]
            named = [n for n in named if n not in self.needed]
            if not named:
                return
            chosen = {name: value for name, value in chosen.items() if name != named[0]}


@contextlib.contextmanager
def few_curves(numbers=itertools.count()):  # noqa: B008
    """Makes runs quick, but lets every eighth draw its curves, which takes longer than its rest."""

    def draw(*arguments) -> None:
        (skip if next(numbers) % 8 else draw_curves)(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        skip = report.draw_curves
        patch.setattr(report, "draw_curves", draw)
        yield


def flags(chosen: dict) -> list[str]:
    return [text for name, value in chosen.items() for text in (f"--{name}", str(value))]
