"""`--eval_only`: evaluates the weights of a checkpoint on the test set; without one, on the
validation split."""

from utils.checkpoints.checkpoint import Checkpoint
from utils.reporting.run_folder import REPORT
from utils.runs.prepare import ReadyModel
from utils.runs.run import Run, better_checkpoint_note
from utils.runs.summary import report_classes
from utils.runs.train_classifier import flip_text, measure_split
from utils.tasks.task import Task


def evaluate_only(run: Run, ready: ReadyModel, task: Task, checkpoint: Checkpoint) -> None:
    """Evaluates `checkpoint`. In the run's folder only the report (--report) is written."""
    folder, report, flip = run.resumed_folder(), run.settings.report, run.settings.flip_test
    ready.strategy.load(checkpoint.weights)
    classes = task.data.classes
    result = measure_split(run, ready, task.test, len(classes) if report else None, flip)
    if report:
        report_classes(run, result, classes, folder / REPORT)
    averaged = "" if checkpoint.average is None else " (averaged weights)"
    split = "validation" if task.test is task.val else "test"
    run.console.say(
        f"step {checkpoint.step}{averaged}: {split} loss {result.loss:.4f}, {split} accuracy "
        f"{result.accuracy:.2f} % on {result.samples:,} samples"
        f"{better_checkpoint_note(checkpoint, folder)}"
    )
    if flip:
        run.console.say(flip_text(result))
