"""Several runs as one classifier, in Python and as `fewhours ensemble`."""

import argparse
import csv
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from utils.errors import UserError
from utils.reporting.console import exit_code, print_line
from utils.reporting.csv_fields import safe_text

from .run import Row, Run, StrPath, surest_mistakes


class Ensemble:
    """Runs that answer together, by the mean of their probabilities.

    Args:
        runs: what `train` and `load` return, or folders: trained on the same classes.

    Raises:
        UserError: a folder holds no run, or there are none.
    """

    def __init__(self, runs: Sequence[Run | StrPath]):
        self.runs = [run if isinstance(run, Run) else Run(run) for run in runs]
        if not self.runs:
            raise UserError("fewhours.Ensemble: name its runs")

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """{"accuracy": per cent, "loss": ..., "samples": ..., "split": ...} of the ensemble, on the
        samples that all its runs measured at their end.

        Raises:
            UserError: they measured different ones, have different classes or more than 100, or
                wrote no answers.
        """
        samples, right, loss, split = 0, 0, 0.0, ""
        for row in self.answers():
            samples, split = samples + 1, row["split"]
            right, loss = right + (row["predicted"] == row["true"]), loss + row["loss"]
        mean = {"accuracy": 100 * right / samples, "loss": loss / samples}
        return mean | {"samples": samples, "split": split}

    @property
    def accuracy(self) -> float:
        """Per cent of the samples that `metrics` is about. Raises UserError, see there."""
        return self.metrics["accuracy"]

    def answers(self) -> Iterator[Row]:
        """As Run.answers, with the mean of the probabilities. Raises UserError, see `metrics`."""
        return mean_answers([run.answers() for run in self.runs])

    def mistakes(self, most: int = 10) -> list[Row]:
        """As Run.mistakes. Raises UserError, see `metrics`."""
        return surest_mistakes(self.answers(), most)

    def predict(self, source: StrPath, **flags: Any) -> list[Row]:
        """As Run.predict, by one run after the other. `predictions="FILE.csv"` keeps the table.

        Raises:
            UserError: the samples cannot be read, or the runs have different classes or more than
                100.
        """
        table = flags.pop("predictions", None)
        if table is not None and _is_same(table, source):
            raise UserError(f"the predictions would replace {table}: name another file")
        rows = [*mean_answers([run.predict(source, **flags) for run in self.runs])]
        if table is not None:
            _write(table, rows)
        return rows


def mean_answers(tables: Sequence[Iterable[Row]]) -> Iterator[Row]:
    """The answer of all models together to each sample: the mean of their probabilities, as in
    Lakshminarayanan et al., "Simple and scalable predictive uncertainty estimation using deep
    ensembles" (2017), arXiv:1612.01474.

    Args:
        tables: of each model the rows of a table of answers.

    Raises:
        UserError: they are not about the same samples, or do not have the probability of each
            class.
    """
    for number, rows in enumerate(itertools.zip_longest(*tables, fillvalue={}), 1):
        first, *others = map(_sample_of, rows)
        if any(other != first for other in others):
            raise UserError(
                f"the answers in row {number} are to different samples, or of other classes: name "
                "runs with the same classes and test set"
            )
        mean = dict(rows[0])
        shares = [n for n, value in mean.items() if n.startswith("p_") and value.__class__ is float]
        if mean["predicted"] and not shares:
            raise UserError("above 100 classes no table has the probability of each: no ensemble")
        for name in shares:
            mean[name] = sum(row[name] for row in rows) / len(rows)
        if shares:
            likeliest = max(shares, key=mean.__getitem__)
            mean |= {"predicted": safe_text(likeliest[2:]), "probability": mean[likeliest]}
            if "loss" in mean:
                least = min(row["loss"] for row in rows)
                likely = sum(math.exp(least - row["loss"]) for row in rows) / len(rows)
                mean["loss"] = least - math.log(likely)
        yield mean


def _sample_of(row: Row) -> Row:
    """What does not depend on the model: the columns, and the cells that name the sample. The text
    is put together from its tokens."""
    row = row | dict.fromkeys(row.keys() & {"text", "predicted"})
    return {name: None if isinstance(value, float) else value for name, value in row.items()}


def _is_same(one: StrPath, other: StrPath) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _write(path: StrPath, rows: Sequence[Row]) -> None:
    from utils.reporting.answers import table_file

    with table_file(os.fspath(path)) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(rows[0])
        for row in rows:
            table.writerow(f"{v:.6f}" if isinstance(v, float) else v for v in row.values())


def main(words: Sequence[str]) -> int:
    """`fewhours ensemble`: returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fewhours ensemble", allow_abbrev=False,
        description="What several runs reach as one classifier, by the mean of their "
        "probabilities, on the samples that they measured at their end; or its predictions.",
    )  # fmt: skip
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="trained on the same classes, at most 100")
    add("--predict", metavar="FILE|FOLDER", help="new pictures or texts, as for one run")
    add("--predictions", metavar="FILE.csv", help="the table for them (default: predictions.csv)")
    options = parser.parse_args(words)
    if options.predictions is not None and options.predict is None:
        parser.error("--predictions names the table of --predict, which is missing")
    table = options.predictions or "predictions.csv"
    return exit_code(lambda: _answer(options.runs, options.predict, table))


def _answer(runs: Sequence[str], source: str | None, table: str) -> None:
    ensemble = Ensemble(runs)
    if source is None:
        _tell(ensemble)
        return
    rows = ensemble.predict(source, predictions=table)
    line = f"{len(rows):,} predictions of {len(ensemble.runs)} runs together: {table}"
    print_line(line, sys.stdout)


def _tell(ensemble: Ensemble) -> None:
    from utils.measures.compute import wilson_interval

    figures = ensemble.metrics
    for run in ensemble.runs:
        print_line(f"{run.folder}: accuracy {Ensemble([run]).accuracy:.2f} %", sys.stdout)
    samples, accuracy = figures["samples"], figures["accuracy"]
    low, high = wilson_interval(accuracy / 100 * samples, samples)
    print_line(
        f"together: {figures['split']} accuracy {accuracy:.2f} % ({low:.1f} to {high:.1f}), loss "
        f"{figures['loss']:.4f} on {samples:,} samples", sys.stdout,
    )  # fmt: skip
