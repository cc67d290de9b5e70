"""What a trained model is used for: evaluation, predictions for new files, and export."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..checkpoints.checkpoint import Checkpoint, Checkpoints
from ..data.images.csv_lists import listed_pictures
from ..data.images.split_names import ENDINGS
from ..data.texts.encodings import BY_ROW
from ..data.texts.rows import column_names
from ..errors import UserError
from ..files import replace_file, written_aside
from ..launch.signals import StoppedBySignal
from ..plural import counted
from ..reporting.recorded import read_runs
from ..reporting.run_folder import EVALUATED, REPORT, default_path
from ..runs.baseline import FRACTION
from ..runs.prepare import kept_modules, measure_split, prepare
from ..runs.report import report_classes, report_samples, views_text, write_page
from ..runs.resume import which_weights
from ..runs.run import Run
from ..settings.config import DEFAULT
from ..settings.run import copy_path
from ..tasks.kinds import Kind
from ..tasks.text_data import text_request
from ..training.keep_fp32 import keep_in_float32
from ..training.objective import Precision
from ..weights.card import ModelCard, TextCard
from .export_onnx import export_onnx
from .export_safetensors import export_safetensors
from .export_samples import samples_for
from .onnx_model import OnnxModel
from .predict_pictures import (
    PictureFiles,
    is_predictions,
    list_pictures,
    predict_images,
)
from .predict_texts import predict_texts


def use_model(run: Run, kind: Kind, checkpoint) -> None:
    """Carries out --predict or --export with the weights of `checkpoint`."""
    settings, say, folder = run.settings, run.console.say, run.resumed_folder()
    output = Path(settings.predictions or folder / "predictions.csv")
    if settings.predict:
        check_output(settings.predict, output, kind.predicts_folders)
    card = kind.card(checkpoint)
    model = kind.build_model(card).to(run.device)
    model.load_state_dict(checkpoint.weights)
    weights = which_weights(checkpoint, folder)
    say(f"{run.model_name} of {folder}, {weights}")
    if settings.export:
        path = folder / "export" / ("model.onnx" if settings.export == "onnx" else
                                    "model.safetensors")  # fmt: skip
        export = export_onnx if settings.export == "onnx" else export_safetensors
        checked = export(model, card, path, architecture=run.model_name, weights=weights)
        say(f"{path}: {checked}")
        for name, (content, what) in card.files().items():
            replace_file(path.with_name(name), content)
            say(f"{path.with_name(name)}: {what}")
        return
    kept = kept_modules(model, settings.keep_fp32, run.precision, say)
    keep_in_float32(model, kept, run.device)
    if settings.infers_by_ort:
        model = OnnxModel(model, samples_for(card), say)
    run.signals.defer()

    def stop_if_asked() -> None:
        if run.interrupted():
            raise StoppedBySignal(
                run.signals.received, "stopped before the last prediction: no CSV file was written"
            )

    predict = _predict_pictures if isinstance(card, ModelCard) else _predict_texts
    count = predict(settings, model, card, output, run.precision, say, stop_if_asked)
    averaged = f", {views_text(views)}" if (views := settings.eval_views) != "none" else ""
    say(f"{count:,} predictions: {output}{averaged}")


def check_copy(file: str) -> None:
    """Raises UserError if --checkpoint FILE cannot be written."""
    if not (path := copy_path(file)).exists():
        with written_aside(path) as aside:
            aside.touch()
        path.unlink()


def copy_model(run: Run, kind: Kind) -> None:
    """Writes the model of a run that has ended as --checkpoint asks for."""
    folder, settings = run.folder.path, run.settings
    checkpoint = Checkpoints(folder / "checkpoints").model(settings.use)
    model = kind.build_model(card := kind.card(checkpoint))
    model.load_state_dict(checkpoint.weights)
    path = copy_path(settings.checkpoint)
    weights = which_weights(checkpoint, folder)
    checked = export_safetensors(model, card, path, run.model_name, weights)
    run.console.say(f"{path}, {weights}: {checked}")


def check_output(source: str, output: Path, takes_folders: bool = True) -> None:
    """Raises UserError if the predictions for `source`, a file or a folder of pictures, would
    replace what is to be predicted, or would be plain text under the name of a compressed file."""
    if output.suffix.lower() == ".gz":
        raise UserError(f"--predictions {output}: the file is not compressed, leave out .gz")
    if not output.is_file() or not os.path.exists(source):
        return
    if not os.path.isdir(source):
        is_input = os.path.samefile(source, output)
    elif not takes_folders or is_predictions(output):  # a folder of texts is refused later
        is_input = False
    else:
        is_input = Path(source).resolve() in output.resolve().parents
        is_input = is_input or any(is_same(path, output) for path in list_pictures(source))
    if is_input:
        raise UserError(
            f"the predictions would replace {output}, which belongs to --predict {source}: name "
            "another file with --predictions"
        )


def is_same(path: str, output: Path) -> bool:
    return os.path.exists(path) and os.path.samefile(path, output)


def _predict_pictures(
    settings,
    model: nn.Module,
    card: ModelCard,
    output: Path,
    precision: Precision,
    say: Callable[[str], None],
    before_batch: Callable[[], None],
) -> int:
    """Writes the predictions for the pictures that --predict names; returns how many there are."""
    if settings.predict.lower().endswith(ENDINGS):
        names, paths = listed_pictures(
            Path(settings.predict), settings.on_bad, settings.image_column, settings.image_dir,
            settings.encoding, lambda line: say(f"note: {line}"),
        )  # fmt: skip
    else:
        names, paths = None, list_pictures(settings.predict, say)
    if names is None and output.exists():  # the table of an earlier call may be in the folder
        paths = [path for path in paths if not is_same(path, output)]
    files = PictureFiles(paths, card, settings.workers, settings.on_bad, settings.form, names)
    return predict_images(
        model, files, output_csv=output, batch_size=settings.batch_size, precision=precision,
        views=settings.eval_views, channels_last=settings.channels_last, say=say,
        before_batch=before_batch,
    )  # fmt: skip


def _predict_texts(
    settings,
    model: nn.Module,
    card: TextCard,
    output: Path,
    precision: Precision,
    say: Callable[[str], None],
    before_batch: Callable[[], None],
) -> int:
    """Likewise for the texts."""
    encoding = None if settings.encoding == BY_ROW else settings.encoding
    request = replace(text_request(settings), clean=card.clean, encoding=encoding)
    return predict_texts(
        model, card, Path(settings.predict), request, output_csv=output,
        batch_size=settings.batch_size, precision=precision, before_batch=before_batch, say=say,
        id_columns=column_names(settings.id_columns) or (),
    )  # fmt: skip


def evaluate_only(run: Run, kind: Kind, checkpoint: Checkpoint | None) -> None:
    """Evaluates `checkpoint`; None: the model as it is, with the weights of --pretrained. In the
    run's folder only the report (--report) is written; without a run only if it is asked for."""
    folder, views = run.resumed_folder(), run.settings.eval_views
    report = run.settings.report and (folder is not None or run.origin["report"] != DEFAULT)
    ready = prepare(run, kind, checkpoint)
    task, what = ready.task, "--pretrained"
    if checkpoint is not None:
        ready.strategy.load(checkpoint.weights)
        what = which_weights(checkpoint, folder)
    if run.settings.infers_by_ort:
        model = OnnxModel(ready.model, samples_for(task.card), run.console.say)
        ready = replace(ready, model=model)
    classes, other = task.data.classes, run.settings.eval_data
    if other and (absent := set(range(len(classes))).difference(task.test.labels.tolist())):
        count = f"{len(absent):,} of the {len(classes):,} classes, such as {classes[min(absent)]!r}"
        run.console.say(f"note: {other} has no samples of {count}")
    result = measure_split(run, ready, task.test, views, records=report)
    split = "val" if task.test is task.val else "test"
    if report:
        folder = folder or default_path(run.model_name, run.data_name)
        place = _report_folder(run.settings, folder, checkpoint)
        outcomes = report_samples(result, task, split, place / EVALUATED, run)
        if outcomes is not None:
            report_classes(outcomes, classes, place, run.console.say)
            run.console.say(f"answers to all samples, and the class report: {place}")
            summary = {} if checkpoint is None or other else read_runs([folder])[0].summary
            if checkpoint is not None and summary.get("model_step") == checkpoint.step:
                write_page(run, folder, task, outcomes, split, FRACTION * summary["seconds_total"])
    split = "validation " if split == "val" else "" if other else "test "
    run.console.say(
        f"{what}: {split}loss {result.loss:.4f}, {split}{result.in_words(result.intervals())} on "
        f"{counted(result.samples, 'sample')}" + (f" of {other}" if other else "")
    )
    if views != "none":
        run.console.say(views_text(views, result))


def _report_folder(settings, folder: Path, checkpoint: Checkpoint | None) -> Path:
    """report/ describes the run's model on the test set: of another checkpoint or other data, a
    subfolder."""
    store, folder = Checkpoints(folder / "checkpoints"), folder / REPORT
    if checkpoint is not None:
        best = None if settings.use == "last" else store.best_of_run()
        if checkpoint.step != (best or max(store.steps(), default=checkpoint.step)):
            folder /= f"step-{checkpoint.step:08}"
    other = settings.eval_data
    return folder / f"eval-{Path(other).resolve().name}" if other else folder
