"""What a study writes at its end: the ranked table, plots, and best.yaml with how it was found."""

from __future__ import annotations

import csv
import io
import platform
import shlex
from importlib.metadata import version

from optuna.trial import FrozenTrial, TrialState

from utils.files import replace_file
from utils.machine.packages import is_installed
from utils.place import as_called
from utils.plural import counted
from utils.reporting.console import aligned
from utils.reporting.metrics import to_json

from .confirm import Verdict
from .files import AGAIN, as_user_error
from .halving import DEFAULT_TRIAL, data_text
from .plots import draw_plots
from .recipe import as_flags, to_yaml
from .runner import Outcome
from .space import shown

SHOWN = 10  # trials in the table on the console; the CSV has all
BORDER = 0.03  # a value within this fraction of its range from an end gets a note


def ranked(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Finished trials, the best first: by how far they came, then by their score there."""

    def key(trial: FrozenTrial):
        failed = trial.state == TrialState.FAIL
        rung = -1 if trial.last_step is None or failed else trial.last_step
        score = trial.intermediate_values[rung] if rung >= 0 else 0.0
        return (not failed, trial.state == TrialState.COMPLETE, rung, score, -trial.number)

    return sorted((t for t in trials if t.state.is_finished()), key=key, reverse=True)


def best_first(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Those that reached the last rung; the default before others that are as good."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return sorted(complete, key=lambda trial: (-trial.value, trial.number))


def best_line(trials: list[FrozenTrial]) -> str:
    complete = best_first(trials)
    if not complete:
        return "no best yet"
    best = complete[0]
    name = "the default recipe" if best.number == DEFAULT_TRIAL else f"trial {best.number}"
    line = f"best {best.value:.2f} % ({name})"
    default = trials[DEFAULT_TRIAL]
    if best.number != DEFAULT_TRIAL and default.state == TrialState.COMPLETE:
        line += f", default {default.value:.2f} %"
    return line


class Report:
    """Args:
    search: a `tuning.search.Search` whose trials are done.
    """

    def __init__(self, search):
        self.search, self.folder, self.study = search, search.folder, search.study
        self.rungs, self.space = search.recipe.rungs, search.space
        self.trials = self.study.trials()
        self.ranking = ranked(self.trials)
        complete = [trial.number for trial in best_first(self.trials)]
        self.rivals = [number for number in complete if number != DEFAULT_TRIAL]

    def write(self, verdict: Verdict, confirmed: list[Outcome]) -> None:
        """Writes the files and prints their summary. Raises UserError.

        Args:
            confirmed: the runs with further seeds.
        """
        say = self.search.console.say
        rows = self.rows()
        for line in [*self.table(rows), *verdict.lines, *self.border_notes(verdict.number)]:
            say(line)
        left = sum(trial.state == TrialState.RUNNING for trial in self.trials)
        if left:
            say(f"{counted(left, 'trial')} not finished: the same command continues them")
        head = self.head(verdict)
        values = self.values(verdict.number)
        recipe = self.search.recipe.handed_over(values)
        summary = {
            "machine": platform.processor() or platform.machine(),
            "handed_over": verdict.number,
            "difference": verdict.difference,
            "standard_error": verdict.error,
            "within_noise": verdict.within_noise,
            "confirmed": verdict.scores,
            "recipe": recipe,
            # The confirmation included.
            "samples_trained": sum(r["samples"] for r in rows) + sum(o.trained for o in confirmed),
            "seconds": sum(r["seconds"] for r in rows) + sum(o.seconds for o in confirmed),
            "trials": rows,
        }
        text = to_yaml(recipe, head).encode("utf-8", "surrogateescape")
        # Another process may end at the same time.
        with as_user_error(self.folder, self.folder, AGAIN), self.study.held():
            replace_file(self.folder / "trials.csv", self.csv(rows).encode())
            replace_file(self.folder / "best.yaml", text)
            content = f"{to_json(summary, indent=1)}\n".encode()
            replace_file(self.folder / "report.json", content)
            draw_plots(
                *(self.trials, self.space, self.rungs, self.folder, verdict.number),
                grid=self.study.grid,
                score=f"validation {self.search.measure.score_title} (%)",
            )
        say(self.search.recipe.lr_rule(values))
        beside = "table and plots" if is_installed("matplotlib") else "table"
        say(f"recipe: {self.folder / 'best.yaml'}; {beside} beside it")

    def values(self, number: int) -> dict:
        """The settings of a trial; those of the default if it has not finished."""
        if not self.trials[number].state.is_finished():
            return self.space.propose(lambda one: one.default)
        return self.study.values(self.trials[number])

    # ---- the table ----------------------------------------------------------------------------

    def rows(self) -> list[dict]:
        """A row for each finished trial, the best first."""
        rows = []
        for rank, trial in enumerate(self.ranking, 1):
            of = {n: trial.user_attrs.get(f"rung{n}") for n in range(len(self.rungs))}
            of = {n: run for n, run in of.items() if run}
            runs, rung = [*of.values()], self.rungs[max(of)] if of else None
            rows.append(
                {
                    "rank": rank,
                    "trial": trial.number,
                    "state": _state(trial),
                    "score": runs[-1]["score"] if runs else None,
                    "epochs": rung.epochs if rung else 0,
                    "subset": rung.subset if rung else 0,
                    "samples": sum(run["trained"] for run in runs),
                    "seconds": round(sum(run["seconds"] for run in runs), 1),
                    "settings": self._known_values(trial),
                    "failure": trial.user_attrs.get("failure", ""),
                }
            )
        return rows

    def _known_values(self, trial: FrozenTrial) -> dict:
        try:
            return self.study.values(trial)
        except ValueError:  # it failed before it had all of them
            return dict(trial.params)

    def table(self, rows: list[dict]) -> list[str]:
        """Lines for the console: the best ones, and the default."""
        names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
        listed = rows[:SHOWN] + [row for row in rows[SHOWN:] if row["trial"] == DEFAULT_TRIAL]
        titles = map(self.space.title, names)
        lines = [["rank", "trial", self.search.measure.score_title, "epochs", "data", *titles, ""]]
        for row in listed:
            score = "-" if row["score"] is None else f"{row['score']:.2f} %"
            lines.append(
                [
                    str(row["rank"]),
                    f"{row['trial']}{' (default)' if row['trial'] == DEFAULT_TRIAL else ''}",
                    score,
                    str(row["epochs"]),
                    data_text(row["subset"]),
                    *(shown(row["settings"].get(name, "")) for name in names),
                    "" if row["state"] == "complete" else row["failure"][:40] or row["state"],
                ]
            )
        hidden = len(rows) - len(listed)
        return aligned(lines) + ([f"... and {hidden} more in trials.csv"] if hidden > 0 else [])

    def csv(self, rows: list[dict]) -> str:
        title, file = self.space.title, io.StringIO()
        names = list(dict.fromkeys(title(name) for row in rows for name in row["settings"]))
        own = [key for key in (rows[0] if rows else {"rank": 0}) if key != "settings"]
        writer = csv.DictWriter(file, [*own, *names], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            line = {key: row[key] for key in own}
            writer.writerow(line | {title(n): value for n, value in row["settings"].items()})
        return file.getvalue()

    # ---- the recipe's head ----------------------------------------------------------------------

    def border_notes(self, number: int) -> list[str]:
        """Notes on settings of the chosen trial that lie at the border of their range."""
        values, notes = self.values(number), []
        if number == DEFAULT_TRIAL:
            return []
        for parameter in self.space.parameters:
            name = parameter.name
            if name not in values or parameter.key not in self.trials[number].params:
                continue
            position = parameter.position(values[name])
            if position is not None and min(position, 1 - position) < BORDER:
                end = parameter.low if position < 0.5 else parameter.high
                if self.space.ends_there(parameter, end):
                    continue
                notes.append(
                    f"note: {name} {shown(values[name])} lies at the border of its range (at "
                    f"{end:g}): a wider range in the space may hold a better one"
                )
        return notes

    def head(self, verdict: Verdict) -> list[str]:
        """Comments of best.yaml: how it was found."""
        search, trials, number = self.search, self.trials, verdict.number
        settings, last = search.settings, self.rungs[-1]
        states = [_state(trial) for trial in self.ranking]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        what = "The default recipe" if number == DEFAULT_TRIAL else f"Trial {number}"
        lines = [
            f"{what} of a search over {search.target.script.name}: {len(states)} trials "
            f"({counts}), sampler {settings.sampler}, seed {search.seed}, study "
            f"{self.folder.name}."
        ]
        run = trials[number].user_attrs.get(f"rung{len(self.rungs) - 1}") if trials else None
        values = self.values(number)
        if run:
            part = f"{100 * last.subset:g} %" if last.subset <= 1 else f"{last.subset:,.0f} samples"
            cut = " cut from the training data" * (search.recipe.val_fraction is not None)
            lines.append(
                f"Its score: {self.search.measure.score_title} {run['score']:.2f} % on "
                f"{run['val_samples']:,} validation samples{cut}, after {last.epochs} epochs on "
                f"{part} of the training data; the test set was not used. The same run again:"
            )
            again = {**search.recipe.of_trial(values, last, search.seed), "threads": search.threads}
            beside = search.recipe.handed_over(values)
            flags = as_flags(search.recipe.in_full(again, beside), beside)
            script = search.target.script.name
            call = as_called(f"python {script}")
            lines.append(f"  {call} --config best.yaml {shlex.join(flags)}")
        lines += [f"{line[0].upper()}{line[1:]}." for line in verdict.lines]
        lines += [f"{line[0].upper()}{line[1:]}." for line in self.border_notes(number)]
        rule = search.recipe.lr_rule(values)
        lines.append(f"Learning rate: {rule}.")
        lines.append(
            f"Python {platform.python_version()}, torch {version('torch')}, optuna "
            f"{version('optuna')}."
        )
        return lines


def _state(trial: FrozenTrial) -> str:
    return {"COMPLETE": "complete", "PRUNED": "stopped early", "FAIL": "failed"}[trial.state.name]
