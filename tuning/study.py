"""A study in its folder: any process can claim its trials; each is trained once, and none is lost.

study.yaml              what it was started with
journal.jsonl           Optuna's journal
trials/0007/.lock       held by the process that trains trial 7, and by its run
trials/0007/rung1/      a run of the entry; rung1.yaml: its settings
confirm/0007-seed1/     likewise, with another seed
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from utils.errors import UserError
from utils.files import replace_file

from .files import Journal, as_user_error, locked, take_lock
from .halving import ALLOWED, DEFAULT_TRIAL, SeededSampler, is_waiting, next_to_promote
from .space import Space

# Other processes hold all trials that are left.
WAIT = "wait"
NAME = "tuning"


@dataclass
class Claim:
    """A trial that this process holds. `values` are its settings; `rung` is the last stage that it
    may train."""

    trial: Trial
    values: dict
    folder: Path
    lock: int
    rung: int

    @property
    def number(self) -> int:
        return self.trial.number

    def close(self) -> None:
        os.close(self.lock)


class Study:
    """Args:
    folder: of the study; created if missing.
    plan: {setting: value} that make its trials comparable, with "sampler", "seed" and "reduction";
        a study that exists must have the same.
    space: what is tuned.
    rungs: number of stages.

    Raises:
        UserError: the folder cannot be written, or holds a study with another plan.
    """

    def __init__(self, folder: Path, plan: dict, space: Space, rungs: int):
        self.folder, self.space = folder, space
        self.rungs, self.reduction = rungs, plan["reduction"]
        self.grid = plan["sampler"] == "grid"
        # Its messages would repeat ours.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", module="optuna")
        with as_user_error(f"--output {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            with self.held():
                self._keep_plan(plan)
                self.study = optuna.create_study(
                    storage=JournalStorage(Journal(folder / "journal.jsonl")),
                    sampler=SeededSampler(plan["sampler"], plan["seed"]),
                    pruner=optuna.pruners.NopPruner(),  # see tuning/halving.py
                    study_name=NAME,
                    direction="maximize",
                    load_if_exists=True,
                )
                points = space.grid() if self.grid else []
                default = space.defaults()  # including parameters that do not apply
                self._enqueue([default, *(p for p in points if not p.items() <= default.items())])

    def _keep_plan(self, plan: dict) -> None:
        path = self.folder / "study.yaml"
        text = yaml.safe_dump(plan, allow_unicode=True, sort_keys=False, width=1000)
        if not path.exists():
            if any(self.folder.glob("config.yaml")):
                raise UserError(f"--output {self.folder} holds a run: give a study its own folder")
            replace_file(path, text.encode("utf-8", "surrogateescape"))
            return
        before = yaml.safe_load(path.read_text("utf-8", "surrogateescape")) or {}
        now = yaml.safe_load(text)
        for name in dict.fromkeys((*now, *before)):
            if now.get(name) != before.get(name):
                raise UserError(
                    f"{name}: the study in {self.folder} was started with {_short(before, name)}, "
                    f"not {_short(now, name)}, and its trials must be comparable: leave it as it "
                    "was, or give another --output"
                )

    def _enqueue(self, points: list[dict]) -> None:
        there = [trial.system_attrs.get("fixed_params") for trial in self.trials()]
        for point in points:
            if point not in there:
                there.append(point)
                self.study.enqueue_trial(point)

    def held(self) -> contextlib.AbstractContextManager:
        """A lock: no other process begins a trial or writes the report within it."""
        return locked(self.folder / ".lock")

    def _as_user_error(self) -> contextlib.AbstractContextManager:
        return as_user_error(f"--output {self.folder}", self.folder)

    # ---- trials -------------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """All, by number. One that waits for its next stage counts as stopped early."""
        trials = self._trials()
        for number, trial in enumerate(trials):
            if is_waiting(trial, self.rungs):
                trials[number] = stopped = copy.copy(trial)
                stopped.state = TrialState.PRUNED
        return trials

    def _trials(self) -> list[FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False))

    def begun(self) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if trial.state != TrialState.WAITING]

    def claim(self, most: int) -> Claim | str | None:
        """The next trial for this process: one whose process has died, one that goes on to its next
        stage, or a new one as long as there are fewer than `most`. WAIT: other processes hold the
        last ones; None: there are no more.

        Raises UserError.
        """
        with self._as_user_error(), self.held():
            begun = self.begun()
            running = [
                trial
                for trial in begun
                if trial.state == TrialState.RUNNING and not is_waiting(trial, self.rungs)
            ]
            for frozen in running:
                claim = self._take(frozen)
                if claim is not None:
                    return claim
            points_left = len(self._trials()) > len(begun)
            full = len(begun) >= most or (self.grid and not points_left)
            at_end = full and not running
            frozen = next_to_promote(begun, self.rungs, self.reduction, at_end)
            if frozen is not None:
                # Its process has reported the score, but may still hold the trial.
                return self._take(frozen, frozen.last_step + 1) or WAIT
            if full:
                return WAIT if running else None
            number = self.study.ask().number
            return self._take(self._trials()[number])

    def claim_to_end(self) -> Claim | None:
        """When time is up: the best waiting trial, if none but the default has finished. Raises
        UserError."""
        with self._as_user_error(), self.held():
            begun = self.begun()
            if any(t.state == TrialState.COMPLETE and t.number for t in begun):
                return None
            frozen = next_to_promote(begun, self.rungs, self.reduction, at_end=True)
            return None if frozen is None else self._take(frozen, frozen.last_step + 1)

    def _take(self, frozen: FrozenTrial, rung: int | None = None) -> Claim | None:
        """A claim on the trial up to `rung` (None: as far as it is allowed already); None if
        another process holds it."""
        folder = self.folder / "trials" / f"{frozen.number:04}"
        lock = take_lock(folder / ".lock")
        if lock is None:
            return None
        trial = Trial(self.study, frozen._trial_id)
        if frozen.number == DEFAULT_TRIAL:
            rung = self.rungs - 1
        elif rung is None:
            rung = frozen.user_attrs.get(ALLOWED, 0)
        else:
            trial.set_user_attr(ALLOWED, rung)
        return Claim(trial, self.space.suggest(trial), folder, lock, rung)

    def tell(self, claim: Claim, state: TrialState, score: float | None = None) -> None:
        self.study.tell(claim.number, score, state)

    def values(self, frozen: FrozenTrial) -> dict:
        """{setting: value} of a trial."""
        return self.space.suggest(optuna.trial.FixedTrial(frozen.params, frozen.number))

    @contextlib.contextmanager
    def confirmation(self, name: str) -> Iterator[tuple[Path, int | None]]:
        """The folder of a run with another seed, and its lock; None if another process holds it."""
        folder = self.folder / "confirm" / name
        with self._as_user_error():
            lock = take_lock(folder / ".tuning")
        try:
            yield folder, lock
        finally:
            if lock is not None:
                os.close(lock)


def _short(plan: Mapping, name: str) -> str:
    text = str(plan.get(name, "its default"))
    return text if len(text) <= 80 else f"{text[:77]}..."
