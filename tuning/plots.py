"""Plots of a study: its history, what matters, each setting against the score.

Not Optuna's own plots, which show only trials that reached the last stage: a few of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from utils.machine.packages import is_installed
from utils.reporting.plots import save_figure

from .halving import DEFAULT_TRIAL, Rung, data_text
from .space import Parameter, Space, shown

# Colours of the rungs before the last, which has LAST.
LOWER = ("#c6dbef", "#9ecae1", "#6baed6")
LAST, DEFAULT, CHOSEN, FAILED = "tab:blue", "tab:orange", "tab:red", "tab:gray"
OF_DEFAULT = {"marker": "D", "ms": 7, "color": DEFAULT, "label": "default recipe"}
OF_CHOSEN = {"marker": "*", "ms": 13, "color": CHOSEN, "label": "handed over"}
COLUMNS = 3
# With fewer trials no importances are drawn.
LEAST_TRIALS = 8


def draw_plots(
    trials: list[FrozenTrial],
    space: Space,
    rungs: list[Rung],
    folder: Path,
    chosen: int,
    grid: bool,
    score: str = "validation accuracy (%)",
) -> None:
    """history.png, slices.png, importance.png and learning_rate.png; grid.png if two settings
    are tuned on a `grid`. None without matplotlib. Raises OSError.

    Args:
        score: what the score of a trial is, for the axes.
    """
    done = [trial for trial in trials if trial.state.is_finished()]
    # If all trials failed, or none has finished yet, there is nothing to draw.
    if not any(trial.intermediate_values for trial in done) or not is_installed("matplotlib"):
        return
    save_figure(_history(done, rungs, chosen, score), folder / "history.png")
    tuned = [p for p in space.parameters if len({t.params.get(p.key) for t in done} - {None}) > 1]
    if tuned:
        save_figure(_slices(done, tuned, rungs, chosen, score), folder / "slices.png")
    found = importances(done)
    if found:
        save_figure(_importance(found, done), folder / "importance.png")
    rates = [p for p in tuned if p.name == "lr"]
    if rates:
        save_figure(_slices(done, rates, rungs, chosen, score, 1.5), folder / "learning_rate.png")
    if grid and len(tuned) == 2:
        figure = _grid(done, tuned[0], tuned[1], score)
        if figure is not None:
            save_figure(figure, folder / "grid.png")


def importances(trials: list[FrozenTrial]) -> dict[str, float]:
    """How much each setting matters for a good trial (sum 1), by PED-ANOVA (Watanabe et al., 2023),
    from the scores at the first rung, which all trials have; {} with too few trials."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    known = [trial for trial in trials if 0 in trial.intermediate_values and trial.params]
    if len(known) < LEAST_TRIALS:
        return {}
    names = set.intersection(*({*trial.params} for trial in known))
    names = {n for n in names if len({str(trial.params[n]) for trial in known}) > 1}
    if len(names) < 2:
        return {}
    study = optuna.create_study(direction="maximize")
    study.add_trials(
        optuna.trial.create_trial(
            params={n: trial.params[n] for n in names},
            distributions={n: known[-1].distributions[n] for n in names},
            value=trial.intermediate_values[0],
        )
        for trial in known
        if all(known[-1].distributions[n] == trial.distributions[n] for n in names)
    )
    if len(study.trials) < LEAST_TRIALS:
        return {}
    # The best quarter against all: a tenth, the default, would be one or two of so few trials.
    evaluator = PedAnovaImportanceEvaluator(target_quantile=0.25)
    found = get_param_importances(study, evaluator=evaluator, normalize=True)
    return {n: fraction for n, fraction in found.items() if math.isfinite(fraction)}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _draw_stages(axis, trials: list[FrozenTrial], rungs: list[Rung], place: Callable) -> None:
    """A point for each trial and stage that it has done, at `place(trial)` and its score."""
    last = len(rungs) - 1
    for index, rung in enumerate(rungs):
        reached = [t for t in trials if index in t.intermediate_values]
        if not reached:
            continue
        colour = LAST if index == last else LOWER[max(0, len(LOWER) - last + index)]
        axis.plot(
            [place(t) for t in reached], [t.intermediate_values[index] for t in reached], "o", ms=5,
            color=colour, label=f"{rung.epochs} epochs, {data_text(rung.subset)} of the data",
        )  # fmt: skip


def _history(trials: list[FrozenTrial], rungs: list[Rung], chosen: int, title: str):
    figure, axis = _figure(8.4, 4.2)
    for trial in trials:
        scores = [*trial.intermediate_values.values()]
        axis.plot([trial.number] * len(scores), scores, color=LOWER[0], lw=1, zorder=1)
    _draw_stages(axis, trials, rungs, lambda trial: trial.number)
    complete = {t.number: t.value for t in trials if t.state == TrialState.COMPLETE}
    if complete:
        numbers = [t.number for t in trials if t.number >= min(complete)]
        best = [max(score for n, score in complete.items() if n <= number) for number in numbers]
        axis.step(numbers, best, where="post", color=LAST, lw=1.2, label="best so far")
    failed = [t.number for t in trials if t.state == TrialState.FAIL]
    if failed:
        axis.plot(
            failed, [0.02] * len(failed), "x", color=FAILED, label="failed",
            transform=axis.get_xaxis_transform(),
        )  # fmt: skip
    if DEFAULT_TRIAL in complete:
        score = complete[DEFAULT_TRIAL]
        axis.axhline(score, color=DEFAULT, ls="--", lw=1, label="default recipe")
    if chosen in complete:
        axis.plot(chosen, complete[chosen], ls="none", **OF_CHOSEN)
    axis.set_xlabel("trial")
    axis.set_ylabel(title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.set_title("each trial, at every stage that it reached", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _slices(
    trials, tuned: list[Parameter], rungs: list[Rung], chosen: int, title: str, scale: float = 1
):
    """A panel for each setting, of `scale` times the usual size."""
    columns = min(COLUMNS, len(tuned))
    lines = -(-len(tuned) // columns)
    size = 3.6 * scale * columns + 0.4, 3.1 * scale * lines + 0.5
    figure, axes = _figure(*size, lines, columns, squeeze=False, sharey=True)
    axes, handles = axes.ravel(), {}
    for axis, parameter in zip(axes, tuned, strict=False):
        _slice(axis, trials, parameter, rungs, chosen)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for axis in axes[len(tuned) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel(title)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, columns),
        fontsize=8, frameon=False,
    )  # fmt: skip
    return figure


def _slice(axis, trials, parameter: Parameter, rungs: list[Rung], chosen: int) -> None:
    """One setting against the score, for the trials that have it."""
    key, choices = parameter.key, parameter.choices
    having = [trial for trial in trials if key in trial.params]

    def place(trial: FrozenTrial):
        value = trial.params[key]
        return choices.index(value) if choices else value

    _draw_stages(axis, having, rungs, place)
    for number, style in ((DEFAULT_TRIAL, OF_DEFAULT), (chosen, OF_CHOSEN)):
        for trial in having:
            if trial.number == number and trial.state == TrialState.COMPLETE:
                axis.plot(place(trial), trial.value, ls="none", mec="white", mew=0.6, **style)
    if parameter.scale == "log":
        axis.set_xscale("log")
    if choices:
        axis.set_xticks(range(len(choices)), [str(choice) for choice in choices])
    notes = ["fraction of the epochs"] if parameter.of_epochs else []
    notes += [f"{name} {', '.join(map(str, are))}" for name, are in parameter.when.items()]
    label = key
    if notes:
        label += f" ({'; '.join(notes)})"
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def _importance(fractions: dict[str, float], trials: list[FrozenTrial]):
    figure, axis = _figure(6.4, 0.9 + 0.38 * len(fractions))
    names = list(reversed(fractions))
    axis.barh(names, [100 * fractions[name] for name in names], color=LAST, height=0.6)
    for name in names:
        axis.text(100 * fractions[name] + 1, name, f"{100 * fractions[name]:.0f} %", va="center",
                  fontsize=8)  # fmt: skip
    axis.set_xlim(0, 115 * max(fractions.values()))
    axis.set_xlabel("importance (%)")
    count = sum(0 in trial.intermediate_values for trial in trials)
    axis.set_title(f"PED-ANOVA of the first stage's scores, {count} trials", fontsize=10)
    axis.grid(alpha=0.3, axis="x")
    return figure


def _grid(trials, first: Parameter, second: Parameter, title: str):
    """The scores of a grid as a table of colours; None if no point of it has finished."""
    scores = {
        (t.params[first.key], t.params[second.key]): t.value
        for t in trials
        if t.state == TrialState.COMPLETE and {first.key, second.key} <= {*t.params}
    }
    rows, columns = list(first.grid), list(second.grid)
    table = [[scores.get((a, b), math.nan) for b in columns] for a in rows]
    if all(math.isnan(score) for line in table for score in line):
        return None
    figure, axis = _figure(1.6 + 0.95 * len(columns), 1.4 + 0.6 * len(rows))
    image = axis.imshow(table, cmap="viridis", aspect="auto")
    low, high = image.get_clim()
    for y, line in enumerate(table):
        for x, score in enumerate(line):
            if not math.isnan(score):
                dark = score < (low + high) / 2
                axis.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=8,
                          color="white" if dark else "black")  # fmt: skip
    axis.set_xticks(range(len(columns)), [shown(b) for b in columns])
    axis.set_yticks(range(len(rows)), [shown(a) for a in rows])
    axis.set_xlabel(second.name)
    axis.set_ylabel(first.name)
    axis.set_title(title, fontsize=10)
    return figure
