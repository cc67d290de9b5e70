"""Compares runs: their results, the settings that differ and their curves, with a page for them."""

import argparse
import itertools
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from ..machine.packages import left_out
from ..measures.compute import paired
from ..measures.table import MEASURES, Measure, known_measure, measure_of
from ..place import as_called
from ..plural import counted
from .console import aligned, duration, exit_code, print_line
from .page import COLOURS, DASHES, plot, write_page
from .recorded import RecordedRun, read_runs

# Runs that differ in nothing but these repeat each other.
OF_NO_ACCOUNT = (
    "seed", "cache_dir", "workers", "save_every", "checkpoint", "checkpoint_hist", "log_every",
    "report", "baseline", "metrics", "id_columns", "wandb", "wandb_project", "wandb_entity",
    "wandb_tags", "trackers",
)  # fmt: skip
SPLITS = {"val": "Validation", "test": "Test"}
CAPTIONS = {  # of the tables, by title
    "Results": "Of each run's model; in brackets 95 % intervals: what other samples would change.",
    "Differences, paired by seed": "In brackets 95 % intervals (Student's t): what other seeds "
    "would change, not other samples. One in twenty misses the true difference.",
    "Settings that differ": "In brackets: where the value came from.",
}

Groups = dict[str, list[RecordedRun]]  # by name: runs that differ only in the seed
Rows = list[list[str]]  # of a table; the first one is its head


def differing_settings(runs: Sequence[RecordedRun]) -> list[str]:
    """Settings with several values among the runs that have them."""
    values: dict[str, set[str]] = {}
    for name, (value, _) in itertools.chain(*(run.settings.items() for run in runs)):
        values.setdefault(name, set()).add(value)
    return [n for n, several in values.items() if len(several) > 1 and n not in OF_NO_ACCOUNT]


def by_seed(runs: Sequence[RecordedRun], measure: Measure) -> dict[str, float]:
    """{seed: result} of the complete runs of a group; if several have the seed, of the last one."""
    complete = [run for run in runs if run.is_complete]
    values = {run.setting("seed"): run.result.get(measure.name) for run in complete}
    return {seed: value for seed, value in values.items() if value is not None}


def grouped(runs: Sequence[RecordedRun], differing: Sequence[str], by: Measure) -> Groups:
    """The runs by their values of the differing settings, named by what their names share, those
    with the best mean first."""
    alike: dict[tuple, list[RecordedRun]] = {}
    for run in sorted(runs, key=lambda run: run.setting("seed").zfill(20)):
        alike.setdefault(tuple(run.setting(name) for name in differing), []).append(run)
    groups: Groups = {}
    means = {
        key: statistics.mean(by_seed(runs, by).values() or [-1]) for key, runs in alike.items()
    }
    for members in (alike[key] for key in sorted(alike, key=lambda key: -means[key])):
        name = members[0].name
        if len(members) > 1:  # "sgd-seed1" and "sgd-seed10": "sgd"
            shared = os.path.commonprefix([run.name for run in members])  # noqa: RUF071
            shared = re.sub(r"[-_. =]*(seed)?[-_. =]*\d*$", "", shared)
            more = f"{name} and {counted(len(members) - 1, 'other run')}"
            name = more if shared in groups or shared[-1:] in ("", "/") else shared
        groups[name] = members
    return groups


def _number(measure: Measure, value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} %" if measure.percent else f"{value:.3f}"


def result_rows(groups: Groups, measures: Sequence[Measure]) -> Rows:
    rows = [["run", "seed", *(m.title for m in measures), "measured on", "epochs", "time", "state"]]
    for run in itertools.chain(*groups.values()):
        row = [run.name, run.setting("seed")]
        for measure in measures:
            row.append(_number(measure, run.result.get(measure.name)))
            if interval := run.interval(measure.name):
                digits = 1 if measure.percent else 3
                row[-1] += f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"
        row.append(f"{run.result['split']}, {run.result['samples']:,}" if run.result else "–")
        row.append(f"{run.records[-1]['epoch']:.3g}" if run.records else "–")
        seconds = run.summary.get("seconds_training")
        rows.append([*row, "–" if seconds is None else duration(seconds), run.state])
    return rows


def setting_rows(groups: Groups, measure: Measure, differing: Sequence[str]) -> Rows:
    """With a column for each group if these are fewer than the settings."""
    rows = [["runs", "seeds", f"mean {measure.title}", *differing]]
    for name, runs in groups.items():
        values = by_seed(runs, measure).values()
        mean = statistics.mean(values) if values else None
        row = [name, str(len(values)), _number(measure, mean)]
        for value, origin in (runs[0].settings.get(key, ("–", "")) for key in differing):
            row.append(f"{value} ({origin})" if origin else value)
        rows.append(row)
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned if len(groups) < len(differing) else rows


def difference_rows(groups: Groups, measures: Sequence[Measure]) -> Rows:
    """Of groups that were measured on the same samples and share two seeds or more."""
    rows = [["runs", "minus", "measure", "mean difference", "seeds", "verdict"]]
    for (one, runs), (other, others) in itertools.combinations(groups.items(), 2):
        alike = not unlike_data([run for run in (*runs, *others) if run.is_complete])
        for measure in measures if alike else ():
            mine, theirs = by_seed(runs, measure), by_seed(others, measure)
            if len(seeds := mine.keys() & theirs) > 1:
                found = paired([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])
                mean, half = found["mean"], found["half"]
                digits, unit = (2, " points") if measure.percent else (3, "")
                ends = f"{mean - half:+.{digits}f} to {mean + half:+.{digits}f}"
                verdict = "better" if measure.rises == (mean > 0) else "worse"
                verdict = verdict if abs(mean) > half else "may be chance"
                words = f"{mean:+.{digits}f}{unit} ({ends})"
                rows.append([one, other, measure.title, words, str(len(seeds)), verdict])
    return rows


def unlike_data(runs: Sequence[RecordedRun]) -> str:
    """In what the samples differ that results were measured on; "" if they are comparable."""
    on = [run.measured_on for run in runs if run.result]
    values = {name: {each[name] for each in on if name in each} for name in itertools.chain(*on)}
    return ", ".join(name for name, several in values.items() if len(several) > 1)


def draw_curves(groups: Groups, measure: Measure) -> dict[str, list[tuple[str, str]]]:
    """{figure: (axis, svg) of each of its plots}, of the evaluations while the runs trained."""
    runs = [(number, run) for number, group in enumerate(groups.values()) for run in group]
    splits = {r["split"] for _, run in runs for r in run.evaluations}
    on = " and ".join(name for split, name in SPLITS.items() if split in splits)
    plots: dict[str, list[tuple[str, str]]] = {}
    for key, unit in ((measure.name, ", %" * measure.percent), ("loss", "")):
        curves = []
        for number, run in runs:
            if records := [r for r in run.evaluations if r.get(key) is not None]:
                x = {by: [r[by] for r in records] for by in ("epoch", "step")}
                x["minutes of training"] = run.minutes(x["epoch"])
                curves.append((min(number, len(COLOURS) - 1), x, [r[key] for r in records]))
        title = f"{on} {measure_of(key).title}{unit}"
        for by in ("epoch", "step", "minutes of training"):
            if any(x[by] for _, x, _ in curves):
                plots.setdefault(title, []).append((by, _plot(curves, by, f"{title} by {by}")))
    return plots


def _plot(curves: list[tuple[int, dict, list]], by: str, title: str) -> str:
    """An <svg> of (number of the series, {axis: x, empty if unknown}, y)."""
    shown = [(number, x[by], y) for number, x, y in reversed(curves) if x[by]]  # best on top
    known = f"{by}, known of {len(shown)} of {len(curves)} runs"
    return plot(shown, by if len(shown) == len(curves) else known, title)


def compare(given: Sequence[Path], page: Path) -> None:
    """Prints the tables and writes the page. Raises UserError, OSError."""
    runs = read_runs(given)
    names = dict.fromkeys(name for run in runs for name in run.result if name != "loss")
    measures = [*filter(None, map(known_measure, names))] or [MEASURES["accuracy"]]
    differing = differing_settings(runs)
    groups = grouped(runs, differing, measures[0])
    rows = [result_rows(groups, measures), difference_rows(groups, measures)]
    rows.append(setting_rows(groups, measures[0], differing))
    tables = [(*told, r) for told, r in zip(CAPTIONS.items(), rows, strict=True) if len(r) > 1]
    for title, caption, cells in tables:
        print_line("\n".join((f"{title}. {caption}", *aligned(cells), "")), sys.stdout)
    unlike, without_curves = unlike_data(runs), left_out("matplotlib", "curves")
    note = f"note: not all results are comparable, as these differ: {unlike}" if unlike else ""
    for line in filter(None, (note, without_curves)):
        print_line(line, sys.stdout)
    plots = {} if without_curves else draw_curves(groups, measures[0])
    heading = f"Comparison of {counted(len(runs), 'run')}"
    what = {"heading": heading, "unlike": unlike, "tables": tables, "groups": [*groups]}
    write_page(page, "compare.html", **what, plots=plots, colours=COLOURS, dashes=DASHES)
    print_line(f"page: {page}", sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=as_called("python -m utils.reporting.compare"), description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run, a folder of runs, a search")
    add("--output", type=Path, default="compare.html", metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(argv)
    return exit_code(lambda: compare(options.runs, options.output))


if __name__ == "__main__":
    sys.exit(main())
