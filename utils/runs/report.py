"""What a run says and leaves at its end: figures on the test set, summary.json, curves.png."""

import contextlib
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..checkpoints.checkpoint import DamagedCheckpoint, read_checkpoint
from ..errors import UserError, one_line
from ..files import reason, replace_file
from ..launch.signals import StoppedBySignal
from ..machine.packages import is_installed, left_out
from ..measures.findings import Doubt, doubtful, find
from ..measures.outcomes import Outcomes
from ..plural import counted
from ..reporting.answers import write_evaluated, write_labels_to_check, write_splits
from ..reporting.classes import draw_mean_lambda, summary_lines, write_class_report
from ..reporting.console import duration, epoch_text
from ..reporting.metrics import to_json
from ..reporting.plots import draw_curves, save_figure
from ..reporting.run_folder import EVALUATED, PAGE, TO_CHECK
from ..reporting.run_page import SPLITS, Seen, write_run_page
from ..tasks.near_copies import near_copies
from ..tasks.task import Task
from ..training.evaluation import Evaluation
from ..training.memory import peak_memory
from ..training.trainer import Trainer
from .baseline import IMPORT_SECONDS, compare, spare_seconds
from .batch_sheet import first_samples
from .prepare import Ready, measure_split
from .run import Run


class Report:
    """The end of a training run: measures its weights on the test set, and writes the report."""

    def __init__(self, run: Run, trainer: Trainer, ready: Ready):
        self.run, self.trainer, self.ready = run, trainer, ready
        self.settings, self.say, self.folder = run.settings, run.console.say, run.folder
        self.classes: list[str] = ready.task.data.classes

    def write_splits(self) -> None:
        """Writes which samples are in which split."""
        if not self.run.leads:
            return
        task, path = self.ready.task, self.folder.splits
        splits = {"train": task.train, "val": task.val, "test": task.test}
        if task.test is task.val:
            del splits["test"]
        labels = {name: one.labels.cpu().numpy() for name, one in splits.items() if one is not None}
        try:
            write_splits(path, {k: (task.names[k], labels[k]) for k in labels}, self.classes)
        except (UserError, OSError) as error:
            self.say(f"{path} is not written: {_why(error)}")

    def remove(self) -> None:
        """Removes what an earlier end of the run has written on its result."""
        names = ("evaluated", "labels_to_check", "page") if self.run.leads else ()
        for path in (getattr(self.folder, name) for name in names):
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def if_interrupted(self) -> Iterator[None]:
        """Writes the report if a signal ends what is done within it."""
        try:
            yield
        except StoppedBySignal:
            self._write("interrupted")
            raise

    def finish(self) -> None:
        """Measures the weights on the test set, and writes the report."""
        settings, trainer, progress = self.settings, self.trainer, self.trainer.progress
        if line := trainer.steps.summary():
            self.say(line)
        status = "stopped_early" if progress.stopped_early else "finished"
        if not settings.final_test:
            evaluation = self._evaluated()
            split = self.trainer.plan.eval_split
            entries, verdict = compare(self.run, trainer, self.ready, evaluation, split)
            self._write(status, None, entries)
            page = self._write_answers(evaluation, split)
            text = evaluation.in_words(evaluation.intervals()) + verdict
            self.say(f"validation {text}, after {self._time_text()}: {page}")
            return
        test = self._measure_last()
        best = self._measure_best(test)
        uses_best = best is not None and settings.use != "last"
        model = best if best is not None and uses_best else test
        which = "best" if uses_best else "average" if settings.ema_decay else "last"
        further = {
            "model_weights": which,
            "model_step": progress.best_step if uses_best else progress.step,
        }
        if averages := _prefixed("views_test", test.views_figures):
            further |= {"eval_views": settings.eval_views} | averages
        further |= _prefixed("model_test", model.figures, but=("loss", "samples"))
        further["model_test_intervals"] = intervals = model.intervals()
        if best is not None:
            further |= _prefixed("best_test", best.figures)
            further |= _prefixed("best_views_test", best.views_figures)
        entries, verdict = compare(self.run, trainer, self.ready, model, "test")
        self._write(status, test.figures, further | entries)
        if averages:
            self.say(views_text(settings.eval_views, test))
        page = self._write_answers(model, "test")
        finite = model.loss is not None and math.isfinite(model.loss)
        note = "" if finite else " (the loss is not finite)"
        if best is not None and progress.best_step != progress.step:
            at, other = epoch_text(progress.best_epoch), test if uses_best else best
            names = (f"the best weights, of epoch {at}", "the last weights")
            mine, theirs = names if uses_best else names[::-1]
            note += f" with {mine} ({theirs}: {other.accuracy:.2f} %)"
        self.say(
            f"test {model.in_words(intervals)} on {counted(model.samples, 'sample')}{note}"
            f"{verdict}, after {self._time_text()}: {page}"
        )

    def _write_answers(self, evaluation: Evaluation, split: str) -> Path:
        """Writes evaluated.csv, the class report and report.html; returns the page, or the run's
        folder if it is not written. A failure costs no more than that, and a line."""
        task = self.ready.task
        outcomes = report_samples(evaluation, task, split, self.folder.evaluated, self.run)
        if outcomes is None or not self.settings.report:
            return self.folder.path
        report_classes(outcomes, self.classes, self.folder.report, self.say)
        seconds = spare_seconds(self.trainer)
        return write_page(self.run, self.folder.path, task, outcomes, split, seconds)

    def _measure_last(self) -> Evaluation:
        """Of the last weights, or of their moving average."""
        settings, trainer, progress = self.settings, self.trainer, self.trainer.progress
        at_end = progress.evaluated or {}
        tested = at_end.get("split") == "test" and at_end["step"] == progress.step
        tested = tested and all(one.name in at_end for one in self.ready.measures.further)
        if tested and settings.eval_views == "none" and self._is_reported():
            return self._evaluated()
        self.say("measuring on the test set")
        with trainer.steps.evaluated_weights():
            test = self._measure_test_set()
        if not tested:
            self._log(test)
        return test

    def _is_reported(self) -> bool:
        """Whether the last evaluation of the training is enough for the report, or the report on it
        is there. Collective."""
        if (evaluation := self.trainer.evaluation) is not None:
            return evaluation.outcomes is not None
        wanted = self.folder.page if self.settings.report else self.folder.evaluated
        return self.run.exchange.gather_json(wanted.exists())[0]

    def _evaluated(self) -> Evaluation:
        """The last evaluation of the training; in a resumed run that had no step left, its figures
        alone."""
        if self.trainer.evaluation is not None:
            return self.trainer.evaluation
        at_end = self.trainer.progress.evaluated
        further = {one: at_end.get(one.name) for one in self.ready.measures.further}
        return Evaluation(at_end["loss"], at_end["accuracy"], at_end["samples"], further=further)

    def _measure_best(self, last: Evaluation) -> Evaluation | None:
        """Of the weights that were best on the validation split; None if there are none, or they
        cannot be read. `last`: of the last weights, used again if these are the best."""
        trainer, progress = self.trainer, self.trainer.progress
        if progress.best_step is None:
            return None
        path, result = trainer.saver.store.path(progress.best_step), last
        if progress.best_step != progress.step:
            weights, failure = None, None
            try:
                weights = read_checkpoint(path).weights
            except (DamagedCheckpoint, UserError) as error:
                failure = str(error)
            # Measuring is collective: a rank that left it out would let the others wait.
            failure = next(filter(None, self.run.exchange.gather_json(failure)), None)
            if failure is not None:
                self.say(f"the best checkpoint, {path}, cannot be measured: {failure}")
                return None
            # Everything is saved, so the weights may be overwritten.
            trainer.steps.strategy.load(weights)
            result = self._measure_test_set()
            self._log(result, model="best")
        self.say(
            f"best on the validation split: epoch {epoch_text(progress.best_epoch)} with "
            f"{self._best_text()}, on the test set {result.in_words()}"
        )
        if self.settings.eval_views != "none":
            self.say(f"the same weights, {views_text(self.settings.eval_views, result)}")
        return result

    def _best_text(self) -> str:
        """Of the validation split at the best step."""
        progress, by = self.trainer.progress, self.trainer.plan.best_by
        text = f"accuracy {progress.best_val_accuracy:.2f} %"
        if by is None or by.name in ("accuracy", "loss"):
            return text
        return f"{by.text(progress.best_val_value)}, {text}"

    def _measure_test_set(self) -> Evaluation:
        """Of the weights that the model holds."""
        loader, views = self.ready.task.test, self.settings.eval_views
        result = measure_split(self.run, self.ready, loader, views, records=True)
        if result is None:  # a signal; the finished run is saved already
            self._write("interrupted")
            raise StoppedBySignal(
                self.run.agreed_signal.signum,  # perhaps received by another rank
                "stopped before the last evaluation, all steps are saved; resume with "
                f"--resume {self.folder.path}",
            )
        return result

    def _log(self, test: Evaluation, **further) -> None:
        step = self.trainer.progress.step
        epoch = step / self.trainer.loader.steps_per_epoch
        further |= test.figures
        self.trainer.log.metrics.write(step=step, epoch=epoch, split="test", **further)

    def _write(self, status: str, test: dict | None = None, further: dict | None = None) -> None:
        """Writes curves, summary and the policy that meta-mixup has learned. If the disk is full,
        the report is incomplete, but the run goes on.

        Args:
            status: "finished", "stopped_early" or "interrupted".
            test: loss, accuracy and samples on the test set; None: not measured.
            further: entries of the summary about other measurements.
        """
        run, trainer = self.run, self.trainer
        if not run.leads:
            return
        progress, settings = trainer.progress, run.settings
        further = self.ready.task.summary_entries | (further or {})
        test, train = test or {}, progress.train or {}
        speed = trainer.samples_per_second
        summary = {
            "status": status,
            "entry": settings.entry,
            "model": run.model_name,
            "dataset": run.data_name,
            "optimizer": settings.optimizer,
            "mixup": settings.mixing_name,
            "mixing_strength": trainer.mixing_control and trainer.mixing_control.strength.current,
            "epochs": progress.step / trainer.loader.steps_per_epoch,
            "steps": progress.step,
            "train_samples": trainer.loader.samples,
            "test_samples": test.get("samples"),
            "train_loss": train.get("loss"),
            "train_accuracy": train.get("accuracy_weighted", train.get("accuracy")),
            **_prefixed("test", {"loss": None, "accuracy": None} | test),
            "time_plan": progress.time_plan,
            "seconds_total": round(trainer.clock.seconds_total, 3),
            "seconds_training": round(progress.seconds_training, 3),
            "seconds_first_step": round(trainer.clock.seconds_first_step, 3),
            "samples_per_second": speed and round(speed, 1),
            "peak_memory_bytes": peak_memory(run.device),
            "skipped_steps": progress.left_out.steps,
            "skipped_steps_by_scaler": progress.left_out.by_scaler,
            "world_size": run.exchange.size,
            "strategy": run.strategy_name,
            "global_batch_size": trainer.loader.step_size,
            "micro_batch_size": trainer.loader.micro_batch,
            "accumulation_steps": trainer.loader.accumulation,
            "device": _device_name(run.device),
            "precision": run.precision.name,
            "ema_decay": settings.ema_decay,
            "threads": run.threads,
            "torch_version": torch.__version__,
            "seed": settings.seed,
        } | trainer.log.hardware.summary(speed)
        summary |= further | trainer.steps.summary_entries()
        if progress.best_step is not None:
            summary |= {
                "best_epoch": progress.best_epoch,
                "best_val_accuracy": progress.best_val_accuracy,
            }
            by = trainer.plan.best_by
            if by is not None and by.name not in ("accuracy", "loss"):
                summary[f"best_val_{by.name}"] = progress.best_val_value
            best = trainer.saver.store.path(progress.best_step)
            if best.is_dir():
                summary["best_checkpoint"] = f"checkpoints/{best.name}"
        note = " (synthetic)" if further.get("synthetic") else ""
        title = f"{run.model_name} on {run.data_name}{note}, {settings.optimizer}"
        # Last: a run whose summary says finished or stopped_early counts as complete.
        text = to_json(summary, indent=2) + "\n"
        meta = trainer.steps.meta
        mean_lambda = None if meta is None else meta.mean_lambda()
        measures = self.ready.measures.further
        writers = [
            lambda: draw_curves(
                trainer.log.metrics.read(), run.folder.curves, title, measures, progress.best_epoch
            )
        ]
        if mean_lambda is not None and is_installed("matplotlib"):
            policy = draw_mean_lambda(mean_lambda.numpy(), self.classes)
            writers += [lambda: save_figure(policy, run.folder.policy)]
        writers += [lambda: replace_file(run.folder.summary, text.encode())]
        for write in writers:
            try:
                write()
            except OSError as error:
                run.console.say(f"{run.folder.path}: {reason(error)}; the report is not complete")

    def _time_text(self) -> str:
        text = f"{duration(self.trainer.progress.seconds_training)} of training"
        hours = self.trainer.log.hardware.summary(None)["gpu_hours"]
        return text if hours is None else f"{text} ({hours:.2f} GPU hours in all)"


def views_text(views: str, evaluation: Evaluation | None = None) -> str:
    """What --eval_views does and, of an evaluation, its figures, for the console."""
    seen = {"mirror": "mirror images", "shift": "shifted pictures"}
    text = f"averaged with {seen.get(views) or ' and '.join(seen.values())} (--eval_views {views})"
    if evaluation is None:
        return text
    return f"{text}: loss {evaluation.views_loss:.4f}, accuracy {evaluation.views_accuracy:.2f} %"


def _prefixed(prefix: str, figures: dict, but: tuple[str, ...] = ("samples",)) -> dict:
    """As entries of the summary."""
    return {f"{prefix}_{key}": value for key, value in figures.items() if key not in but}


def report_classes(
    outcomes: Outcomes, classes: list[str], folder: Path, say: Callable[[str], None]
) -> None:
    """Says which classes are worst, and writes the class report into the folder."""
    try:
        if (matrix := find(outcomes, 0).matrix) is None:  # there are too many
            return
        for line in summary_lines(matrix, classes):
            say(line)
        write_class_report(matrix, classes, folder)
    except (OSError, UserError) as error:
        say(f"{folder}: {_why(error)}; the class report is not complete")


def _doubts(
    run: Run, folder: Path, classes: list[str], outcomes: Outcomes, seconds: float
) -> list[Doubt]:
    """Writes labels_to_check.csv, unless the run is too short for it, and returns the samples in
    it. A failure costs no more than that."""
    path, doubts = folder / TO_CHECK, list[Doubt]()
    if seconds < IMPORT_SECONDS:
        return doubts
    try:
        if not (line := left_out("cleanlab", "doubtful labels")):
            doubts = doubtful(outcomes)
            write_labels_to_check(path, folder / EVALUATED, doubts, classes)
            line = f"{counted(len(doubts), 'doubtful label')} of {outcomes.samples:,}: {path}"
    except Exception as error:  # also cleanlab's own, whatever they are
        line = f"{path} is not written: {one_line(error, 200)}"
    run.console.say(line)
    return doubts


def write_page(
    run: Run, folder: Path, task: Task, outcomes: Outcomes, split: str, seconds: float
) -> Path:
    """Writes labels_to_check.csv and report.html into the folder of a run; returns the page, or the
    folder if it is not written, of which a line tells. Each takes up to `seconds` to search."""
    page, title = folder / PAGE, f"{run.model_name} on {run.data_name}"
    doubts = _doubts(run, folder, task.data.classes, outcomes, seconds)
    labels = {name: one.labels for name, one in task.simple_model.splits.items()}
    notes = [line.removeprefix("note: ") for line in task.data.notes]
    try:
        copies = near_copies(task.simple_model, split, seconds, Path(run.settings.cache_dir))
        if copies is not None:
            count = f"{len(copies):,} of {len(labels[split]):,} {SPLITS[split]} samples"
            notes.append(f"{count} are nearly the same as training samples")
        if copies:
            run.console.say(f"note: {notes[-1]}, which flatters the figures: see {page}")
        seen = Seen(task.names, labels, split, notes, copies or (), lambda: first_samples(task))
        write_run_page(folder, title, task.data.classes, outcomes, seen, doubts)
    except (OSError, UserError) as error:
        run.console.say(f"{page} is not written: {_why(error)}")
        return folder
    return page


def report_samples(
    evaluation: Evaluation, task: Task, split: str, path: Path, run: Run
) -> Outcomes | None:
    """Writes what was answered to each sample of the split to `path`, and returns it, if it was
    recorded and this rank leads."""
    outcomes = evaluation.outcomes
    if outcomes is None or not run.leads:
        return None
    failure = outcomes.failure
    try:
        if failure is None:
            write_evaluated(path, outcomes, task.data.classes, split, task.names[split])
    except (OSError, UserError) as error:
        failure = _why(error)
    if failure is not None:
        run.console.say(f"{path} is not written: {failure}")
    return None if outcomes.failure else outcomes


def _why(error: OSError | UserError) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def _device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.processor() or platform.machine()})"
