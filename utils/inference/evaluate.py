"""`--eval_only`: evaluates the weights of a checkpoint, or those of --pretrained, on the test set;
without one, on the validation split."""

from dataclasses import replace
from pathlib import Path

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints
from utils.reporting.run_folder import REPORT, default_path
from utils.runs.prepare import ReadyModel
from utils.runs.run import Run, which_weights
from utils.runs.summary import report_classes
from utils.runs.train_classifier import flip_text, measure_split
from utils.tasks.task import Task


def evaluate_only(run: Run, ready: ReadyModel, task: Task, checkpoint: Checkpoint | None) -> None:
    """Evaluates `checkpoint`; None: the model as it is, with the weights of --pretrained. In the
    run's folder only the report (--report) is written."""
    folder, report, flip = run.resumed_folder(), run.settings.report, run.settings.flip_test
    what = "--pretrained"
    if checkpoint is not None:
        ready.strategy.load(checkpoint.weights)
        what = which_weights(checkpoint, folder)
    if run.settings.infers_by_ort:
        # Training does without what these import.
        from utils.inference.export_samples import samples_for
        from utils.inference.onnx_model import OnnxModel

        model = OnnxModel(ready.model, samples_for(task.card), run.console.say)
        ready = replace(ready, model=model)
    classes = task.data.classes
    result = measure_split(run, ready, task.test, len(classes) if report else None, flip)
    if report:
        folder = folder or default_path(run.model_name, run.data_name)
        report_classes(run, result, classes, _report_folder(run, folder, checkpoint))
    split = "validation" if task.test is task.val else "test"
    run.console.say(
        f"{what}: {split} loss {result.loss:.4f}, {split} accuracy {result.accuracy:.2f} % on "
        f"{result.samples:,} samples"
    )
    if flip:
        run.console.say(flip_text(result))


def _report_folder(run: Run, folder: Path, checkpoint: Checkpoint | None) -> Path:
    """Of a checkpoint that is not the run's model, a subfolder: report/ describes the model."""
    if checkpoint is None:
        return folder / REPORT
    store = Checkpoints(folder / "checkpoints")
    best = None if run.settings.use == "last" else store.best_of_run()
    if checkpoint.step == (best or max(store.steps(), default=checkpoint.step)):
        return folder / REPORT
    return folder / REPORT / f"step-{checkpoint.step:08}"
