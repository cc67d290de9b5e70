"""The search: trials, a confirmation with other seeds, then the recipe and its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.trial import TrialState

from utils.errors import UserError
from utils.launch.signals import Signals, StoppedBySignal
from utils.measures.table import measure_of
from utils.plural import counted
from utils.reporting.console import Console, duration
from utils.settings.config import IMPLIED, Config, fields

from .confirm import FINALISTS, Confirmation
from .files import as_user_error
from .flags import seconds
from .halving import DEFAULT_TRIAL, build_rungs, data_text
from .recipe import Recipe
from .report import Report, best_line
from .runner import Interrupted, Outcome, Runner, machine
from .space_file import load_space
from .study import Claim, Study

if TYPE_CHECKING:
    from .entry import Target  # which starts this module

# A search ends after so many failures without any success.
HOPELESS = 3
POLL_SECONDS = 0.2
# A first stage with fewer optimizer steps hardly tells good settings from bad ones: 28 did not, see
# benchmarks/results/tuning.md.
ENOUGH_STEPS = 100
# Settings that may change when a study is continued: the same data in another place.
FREE: tuple = ("data_dir", "cache_dir", "train_file", "test_file", "val_file", "device", "threads")
FREE += ("workers", "save_every", "log_every", "checkpoint_hist", "wandb", "wandb_project")
FREE += ("labels", "trackers")
OF_THE_STUDY = ("sampler", "prune", "rungs", "reduction", "trial_epochs", "trial_subset")


class Search:
    """Args:
    settings, origin: of the entry and of TuningFlags, as `utils.settings.config.parse` gives them.
    """

    def __init__(self, target: Target, settings, origin: dict, signals: Signals):
        self.started = time.monotonic()
        self.target, self.settings, self.signals = target, settings, signals
        self.limit = seconds(settings.timeout)
        self.console = Console()
        known = fields(target.settings_class)
        origin = {name: came for name, came in origin.items() if name in known}
        base = target.settings_class(**{name: getattr(settings, name) for name in known})
        path = target.space if settings.space is None else Path(settings.space)
        space, raw, notes = load_space(path, target.settings_class, base, origin, settings.params)
        self.space = space
        by = base.best_by or "accuracy"
        if ":" in by:
            raise UserError(
                f"--best_by {by}: a search needs one of the measures of docs/measures.md, whose "
                "range is known"
            )
        self.measure = measure_of(by)
        self.implied = {name for name, came in origin.items() if came == IMPLIED}
        subset, fraction = raw.pop("subset", None), settings.trial_val_fraction
        if settings.trial_subset is None:
            whole = subset or 1.0
            settings.trial_subset = 0.2 * whole if whole <= 1 else float(round(0.2 * whole))
        if fraction is None and not own_validation(base):
            fraction = base.val_fraction or 0.2
        settings.trial_val_fraction = fraction
        number = settings.rungs if settings.prune else 1
        rungs = build_rungs(
            settings.trial_epochs, settings.trial_subset, number, settings.reduction
        )
        self.recipe = Recipe(space, rungs, fraction, settings.recipe_batch_size, subset or 1.0)
        default = space.propose(lambda one: one.default)
        for rung in rungs:  # wrong flags are reported before anything is trained
            self.recipe.of_trial(default, rung, base.seed)
        self.recipe.handed_over(default)
        data = getattr(base, "dataset", "data")
        folder = Path(settings.output or Path("runs", f"tuning-{target.model_name(base)}-{data}"))
        self.folder, self.seed = folder, base.seed
        self.study = Study(folder, self._plan(), space, len(rungs))
        self.total = settings.trials
        if self.study.grid:  # all points are queued from the start, after the default
            points = len(self.study.trials())
            self.total = min(settings.trials or points, points)
            if self.total < points:
                notes.append(f"{points - self.total} of {points} points of the grid are left out")
        self.jobs, self.threads, devices = machine(settings.jobs, base)
        self.runner = Runner(target.script, self.threads, devices, self._time_is_up, self.measure)
        self.errors: list[BaseException] = []
        self.shown = 0  # trials that the progress bar has counted
        self.said: set[int] = set()  # numbers of the trials that have had their line
        self.best = ""  # the line on the best trial, as last printed
        self.reserve = 0.0  # seconds that confirmation and last run will take
        self.search_is_over = False
        self._say_lock = threading.Lock()
        self._introduce(notes)

    def _plan(self) -> dict:
        """The settings that make the trials of a study comparable, by name."""
        settings = self.settings
        plan = {"entry": self.target.script.name, "seed": self.seed}
        plan |= {name: getattr(settings, name) for name in OF_THE_STUDY}
        plan["trial_val_fraction"] = settings.trial_val_fraction
        if self.measure.name != "accuracy":
            plan["score"] = self.measure.score_title
        for name, value in sorted(self.space.raw.items()):
            if name not in FREE and name not in self.implied:
                plan[name] = value
        for one in self.space.parameters:
            where = f"{one.low:g} to {one.high:g}" if one.low is not None else str(one.choices)
            of = " of the epochs" if one.of_epochs else ""
            when = f" when {dict(one.when)}" if one.when else ""
            plan[f"space of {one.key}"] = f"{one.scale} {where}{of}, from {one.default}{when}"
        return plan

    def _introduce(self, notes: list[str]) -> None:
        with as_user_error(f"--output {self.folder}"):
            self.console.open_log(self.folder / "log.txt")
        say, settings = self.console.say, self.settings
        for note in notes:
            say(note)
        names = list(self.space.propose(lambda one: one.default))
        stages = " -> ".join(
            f"{rung.epochs} x {data_text(rung.subset)}" for rung in self.recipe.rungs
        )
        say(f"tuning {', '.join(names)} of {self.target.script.name} by {settings.sampler}")
        fraction = settings.trial_val_fraction
        scored = (
            "their own validation split" if fraction is None else f"{100 * fraction:g} % held out"
        )
        say(
            f"{self.total} trials, {self.jobs} at once with "
            f"{counted(self.threads, 'CPU thread')} each;"
            f" epochs x training data of a trial: {stages}; scored on {scored}"
        )
        done = len(self.study.begun())
        say(f"study {self.folder}" + (f", {done} trials begun before" if done else ""))

    # ---- the work -----------------------------------------------------------------------------

    def run(self) -> None:
        """The whole search. Raises UserError, StoppedBySignal."""
        self.signals.defer()
        for trial in self.study.trials()[:1]:  # of a study that is continued
            whole = trial.user_attrs.get(f"rung{len(self.recipe.rungs) - 1}")
            if whole is not None:
                self._reserve(whole["seconds"])
        try:
            self.shown = self._finished()
            self.console.start_bar(self.total, self.shown, unit=" trials")
            self._in_threads(self._search)
            self.search_is_over = True
            self._in_threads(self._finish_one_trial)
            self.console.end_bar()
            report = Report(self)
            confirmation = Confirmation(self, report.rivals)
            self._in_threads(confirmation.work)
            report.write(confirmation.verdict(), [*confirmation.outcomes.values()])
        finally:
            self.console.close()

    def _in_threads(self, work: Callable[[int], None]) -> None:
        """Runs work(slot) for each job until all return; raises the first error."""

        def guarded(slot: int) -> None:
            try:
                work(slot)
            except BaseException as error:
                self.errors.append(error)
                self.runner.stopping.set()

        threads = [threading.Thread(target=guarded, args=(slot,)) for slot in range(self.jobs)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self.signals.received is not None:
                self.runner.stopping.set()
            time.sleep(POLL_SECONDS)
        self.console.end_bar()
        if self.signals.received is not None:
            raise StoppedBySignal(self.signals.received, self._stopped_line())
        real = [error for error in self.errors if not isinstance(error, Interrupted)]
        if real:
            raise real[0]
        if self.errors:  # another process stopped a run
            raise StoppedBySignal(15, self._stopped_line())

    def _stopped_line(self) -> str:
        return f"stopped; the search is kept in {self.folder}: the same command continues it"

    def _time_is_up(self) -> bool:
        """Whether the search has to end. What follows it has the time that was reserved for it."""
        if self.limit is None or self.search_is_over:
            return False
        # At least half of the time is for the search, even if what follows then overruns it.
        left = max(self.limit - self.reserve, self.limit / 2)
        return time.monotonic() - self.started > left

    def _search(self, slot: int) -> None:
        """Trials one after the other, until there are no more."""
        while not (self.runner.stopping.is_set() or self._time_is_up()):
            claim = self.study.claim(self.total)
            if claim is None:
                return
            if isinstance(claim, str):  # WAIT
                time.sleep(POLL_SECONDS)
                continue
            try:
                self._carry_out(claim, slot)
            except Interrupted:
                if not self._time_is_up():
                    raise
            finally:
                claim.close()

    def _finish_one_trial(self, slot: int) -> None:
        """When the time is up, trains the best waiting trial through its last stage if no other has
        finished, so that there is one to compare with the default."""
        while slot == 0 and not self.runner.stopping.is_set():
            claim = self.study.claim_to_end()
            if claim is None:
                return
            try:
                self._carry_out(claim, slot)
            finally:
                claim.close()

    def _carry_out(self, claim: Claim, slot: int) -> None:
        """Trains a trial through the stages that it is allowed; the default through the last one
        only."""
        last = len(self.recipe.rungs) - 1
        first = last if claim.number == DEFAULT_TRIAL else 0
        for index in range(first, claim.rung + 1):
            rung = self.recipe.rungs[index]
            try:
                wanted = self.recipe.of_trial(claim.values, rung, self.seed)
            except UserError as error:  # its values contradict each other
                return self._fail(claim, str(error))
            outcome = self.runner.run(claim.folder / f"rung{index}", wanted, slot, claim.lock)
            if outcome.failure is not None:
                return self._fail(claim, outcome.failure)
            known = self.study.trials()[claim.number]
            if index not in known.intermediate_values:
                claim.trial.set_user_attr(f"rung{index}", vars(outcome))
                claim.trial.report(outcome.score, index)
                self._note_length(claim, outcome, index, last)
        if index == last:
            self.study.tell(claim, TrialState.COMPLETE, outcome.score)
            return self._done(claim, f"{outcome.score:.2f} %")
        self._done(claim, f"{outcome.score:.2f} % after {rung.epochs} epochs")

    def _note_length(self, claim: Claim, outcome: Outcome, index: int, last: int) -> None:
        """Reserves time by the length of the first run, and says how long the search will take;
        notes a first stage that is too short."""
        if claim.number == DEFAULT_TRIAL:
            self._reserve(outcome.seconds)
            with self._say_lock:
                whole = self._length(outcome.seconds) + self.reserve * bool(self.settings.confirm)
                self.console.say(
                    f"a whole trial takes {duration(outcome.seconds)}: about {duration(whole)} in "
                    f"all for {self.total} trials; --timeout 30m or a lower --trials shortens it"
                )
        is_first = claim.number == DEFAULT_TRIAL + 1 and index == 0 < last
        if is_first and outcome.steps < ENOUGH_STEPS:
            with self._say_lock:
                self.console.say(
                    f"note: the first stage of a trial has only {outcome.steps} optimizer steps, "
                    "which tells little; raise --epochs or --subset, or lower --rungs"
                )

    def _length(self, seconds: float) -> float:
        """About how many seconds all trials take if one that goes through its last stage alone, as
        the default does, takes `seconds`: of those of a stage, 1 in --reduction reach the next."""
        sizes = [rung.epochs * rung.subset for rung in self.recipe.rungs]
        stages = sum(size / self.settings.reduction**at for at, size in enumerate(sizes))
        return seconds * (1 + (self.total - 1) * stages / sizes[-1]) / self.jobs

    def _reserve(self, seconds: float) -> None:
        """Reserves time of --timeout for the confirmation and a last run, of `seconds` each."""
        runs = (1 + FINALISTS) * self.settings.confirm
        reserve = seconds * (1 + -(-runs // self.jobs))
        if self.limit is not None and not self.reserve and reserve > self.limit / 2:
            with self._say_lock:
                self.console.say(
                    f"note: the confirmation and a last trial take about {reserve:.0f} s, more "
                    "than half of --timeout, which will be overrun: a lower --confirm takes less"
                )
        self.reserve = reserve

    def _fail(self, claim: Claim, why: str) -> None:
        claim.trial.set_user_attr("failure", why)
        self.study.tell(claim, TrialState.FAIL)
        self._done(claim, f"failed: {why}")
        ended = [trial for trial in self.study.trials() if trial.state.is_finished()]
        if len(ended) >= HOPELESS and all(t.state == TrialState.FAIL for t in ended):
            raise UserError(f"all {len(ended)} trials have failed, the last one: {why}")

    def _finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.trials())

    def _done(self, claim: Claim, how: str) -> None:
        """Prints a line for the trial after its first stage, and the best so far. Results of
        further stages go to the log; without a terminal, a new best has a line of its own."""
        line = f"trial {claim.number} ({self.space.line(claim.values)}): {how}"
        with self._say_lock:
            best, finished = best_line(self.study.trials()), self._finished()
            if self.console.live:
                self.console.log(line)
                self.console.progress(best)
            elif claim.number not in self.said:
                self.said.add(claim.number)
                self.console.say(f"[{finished}/{self.total}] {line}; {best}")
            else:
                self.console.log(line)
                if best != self.best:
                    self.console.say(f"[{finished}/{self.total}] {best}")
            self.best = best
            # A trial that goes to its next stage was counted after its first one.
            self.console.advance(max(0, finished - self.shown))
            self.shown = max(self.shown, finished)


def own_validation(base: Config) -> bool:
    """Whether the data have a validation split of their own."""
    if hasattr(base, "val_file"):
        return bool(base.val_file)
    if base.val_is_validation:
        return True
    folder = Path(base.data_dir)
    if base.dataset in ("csv", "tar", "tfrecord", "parquet"):
        end = "*.[ct]sv" if base.dataset == "csv" else "*"
        patterns = [[f"{name}{end}", f"*/{name}{end}"] for name in ("val", "test")]
        return all(any(any(folder.glob(one)) for one in either) for either in patterns)
    if base.dataset != "imagefolder":
        return False
    return all((folder / name).is_dir() for name in ("train", "val", "test"))
