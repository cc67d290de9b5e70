"""`--eval_only`: evaluates the weights of a checkpoint, or those of --pretrained, on the test set;
without one, on the validation split."""

from dataclasses import replace
from pathlib import Path

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints
from utils.plural import counted
from utils.reporting.run_folder import REPORT, default_path
from utils.runs.prepare import measure_split, prepare
from utils.runs.report import flip_text, report_classes
from utils.runs.resume import which_weights
from utils.runs.run import Run
from utils.tasks.kinds import Kind


def evaluate_only(run: Run, kind: Kind, checkpoint: Checkpoint | None) -> None:
    """Evaluates `checkpoint`; None: the model as it is, with the weights of --pretrained. In the
    run's folder only the report (--report) is written."""
    folder, report, flip = run.resumed_folder(), run.settings.report, run.settings.flip_test
    ready, what = prepare(run, kind, checkpoint), "--pretrained"
    task = ready.task
    if checkpoint is not None:
        ready.strategy.load(checkpoint.weights)
        what = which_weights(checkpoint, folder)
    if run.settings.infers_by_ort:
        # Training does without what these import.
        from utils.inference.export_samples import samples_for
        from utils.inference.onnx_model import OnnxModel

        model = OnnxModel(ready.model, samples_for(task.card), run.console.say)
        ready = replace(ready, model=model)
    classes, other = task.data.classes, run.settings.eval_data
    if other and (absent := set(range(len(classes))).difference(task.test.labels.tolist())):
        count = f"{len(absent):,} of the {len(classes):,} classes, such as {classes[min(absent)]!r}"
        run.console.say(f"note: {other} has no samples of {count}")
    result = measure_split(run, ready, task.test, len(classes) if report else None, flip)
    if report:
        folder = folder or default_path(run.model_name, run.data_name)
        report_classes(run, result, classes, _report_folder(run, folder, checkpoint))
    split = "validation " if task.test is task.val else "" if other else "test "
    run.console.say(
        f"{what}: {split}loss {result.loss:.4f}, {split}accuracy {result.accuracy:.2f} % on "
        f"{counted(result.samples, 'sample')}" + (f" of {other}" if other else "")
    )
    if flip:
        run.console.say(flip_text(result))


def _report_folder(run: Run, folder: Path, checkpoint: Checkpoint | None) -> Path:
    """report/ describes the run's model on the test set: of another checkpoint or other data, a
    subfolder."""
    store, folder = Checkpoints(folder / "checkpoints"), folder / REPORT
    if checkpoint is not None:
        best = None if run.settings.use == "last" else store.best_of_run()
        if checkpoint.step != (best or max(store.steps(), default=checkpoint.step)):
            folder /= f"step-{checkpoint.step:08}"
    other = run.settings.eval_data
    return folder / f"eval-{Path(other).resolve().name}" if other else folder
