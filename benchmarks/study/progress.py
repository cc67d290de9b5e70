"""How far a study has come, and how long the rest takes."""

import statistics

from benchmarks.study.plan import Case, Plan, Result, Run
from benchmarks.study.train import Bench
from utils.reporting.console import duration


class Progress:
    """One line for each finished run, with what is left."""

    def __init__(self, cases: list[Case], plan: Plan, speeds: dict, bench: Bench, jobs: int):
        self.bench, self.jobs = bench, jobs
        self.speeds = {
            (label, batch): statistics.median(figures)
            for batch, of_batch in speeds.items()
            for label, figures in of_batch.items()
        }
        self.runs = len(cases) * plan.runs
        self.left = sum(self._case(case, plan) for case in cases)
        self.done, self.expected, self.took = 0, 0.0, 0.0  # the two of this process, in seconds

    def _case(self, case: Case, plan: Plan) -> float:
        """Expected seconds of all its runs."""
        label, batch = case.optimizer.label, case.batch
        finals = plan.seeds * len(plan.fractions)
        return (
            plan.total_epochs * self._epoch(label, batch)
            + plan.trials * self._evaluation(label, batch, "val")
            + finals * self._evaluation(label, batch, "test")
        )

    def _epoch(self, label: str, batch: int) -> float:
        return len(self.bench.splits["train"]) / self.speeds[label, batch]

    def _evaluation(self, label: str, batch: int, split: str) -> float:
        """Seconds; a forward pass is about a third of a training step."""
        return len(self.bench.splits[split]) / self.speeds[label, batch] / 3

    def _seconds(self, run: Run) -> float:
        expected = run.epochs * self._epoch(run.label, run.batch)
        return expected + self._evaluation(run.label, run.batch, run.split)

    def skip(self, run: Run) -> None:
        self.done, self.left = self.done + 1, self.left - self._seconds(run)

    def line(self, run: Run, result: Result) -> str:
        self.skip(run)
        if result.accuracy is not None:  # one that diverged ended early: it says nothing
            self.expected, self.took = (
                self.expected + self._seconds(run),
                self.took + result.seconds,
            )
        accuracy = "diverged" if result.accuracy is None else f"{run.split} {result.accuracy:.2f} %"
        return (
            f"[{self.done}/{self.runs}] {run.label}, batch {run.batch}, lr {run.lr:g}, "
            f"weight decay {run.weight_decay:g}, {run.epochs:g} epochs, seed {run.seed}: "
            f"{accuracy} in {duration(result.seconds)}; about {self.estimate()} left"
        )

    def estimate(self) -> str:
        slower = self.took / self.expected if self.expected else 1.0
        return duration(max(0.0, self.left) * slower / self.jobs)
