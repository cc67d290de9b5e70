"""What a trained model is used for: predictions for new files, and export."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from utils.data.images.csv_lists import listed_pictures
from utils.data.images.split_names import ENDINGS
from utils.data.texts.encodings import BY_ROW
from utils.data.texts.rows import column_names
from utils.errors import UserError
from utils.files import replace_file
from utils.inference.export_onnx import export_onnx
from utils.inference.export_safetensors import export_safetensors
from utils.inference.export_samples import samples_for
from utils.inference.onnx_model import OnnxModel
from utils.inference.predict_pictures import (
    PictureFiles,
    is_predictions,
    list_pictures,
    predict_images,
)
from utils.inference.predict_texts import predict_texts
from utils.launch.signals import StoppedBySignal
from utils.runs.prepare import kept_modules
from utils.runs.resume import which_weights
from utils.runs.run import Run
from utils.tasks.kinds import Kind
from utils.training.keep_fp32 import keep_in_float32
from utils.weights.card import ModelCard, TextCard


def use_model(run: Run, kind: Kind, checkpoint) -> None:
    """Carries out --predict or --export with the weights of `checkpoint`."""
    settings, say, folder = run.settings, run.console.say, run.resumed_folder()
    output = Path(settings.predictions or folder / "predictions.csv")
    if settings.predict:
        check_output(settings.predict, output, settings.task == "pictures")
    card = kind.card(checkpoint)
    model = kind.build_model(card).to(run.device)
    model.load_state_dict(checkpoint.weights)
    weights = which_weights(checkpoint, folder)
    say(f"{run.model_name} of {folder}, {weights}")
    if isinstance(card, ModelCard):
        card = replace(card, form=asdict(settings.form))
    if settings.export:
        path = folder / "export" / ("model.onnx" if settings.export == "onnx" else
                                    "model.safetensors")  # fmt: skip
        export = export_onnx if settings.export == "onnx" else export_safetensors
        checked = export(model, card, path, architecture=run.model_name, weights=weights)
        say(f"{path}: {checked}")
        for name, content in card.files().items():
            replace_file(path.with_name(name), content)
            say(f"{path.with_name(name)}: the tokenizer, for the `tokenizers` library")
        return
    keep_in_float32(model, kept_modules(run, model), run.device)
    if settings.infers_by_ort:
        model = OnnxModel(model, samples_for(card), say)
    run.signals.defer()
    count = PREDICT[settings.task](run, model, card, output)
    if count is None:
        raise StoppedBySignal(
            run.signals.received, "stopped before the last prediction: no CSV file was written"
        )
    flipped = ", averaged with mirror images (--flip_test)" if settings.flip_test else ""
    say(f"{count:,} predictions: {output}{flipped}")


def check_output(source: str, output: Path, of_pictures: bool = True) -> None:
    """Raises UserError if the predictions for `source`, a file or a folder of pictures, would
    replace what is to be predicted, or would be plain text under the name of a compressed file."""
    if output.suffix.lower() == ".gz":
        raise UserError(f"--predictions {output}: the file is not compressed, leave out .gz")
    if not output.is_file() or not os.path.exists(source):
        return
    if not os.path.isdir(source):
        is_input = os.path.samefile(source, output)
    elif not of_pictures or is_predictions(output):  # a folder of texts is refused later
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


def predict_pictures(run: Run, model, card: ModelCard, output: Path) -> int | None:
    """Writes the predictions for the pictures that --predict names; how many, or None if a signal
    came first."""
    settings = run.settings
    if settings.predict.lower().endswith(ENDINGS):
        names, paths = listed_pictures(
            Path(settings.predict), settings.on_bad, settings.image_column, settings.image_dir,
            settings.encoding, lambda line: run.console.say(f"note: {line}"),
        )  # fmt: skip
    else:
        names, paths = None, list_pictures(settings.predict, run.console.say)
    if names is None and output.exists():  # the table of an earlier call may be in the folder
        paths = [path for path in paths if not is_same(path, output)]
    predictions = predict_images(
        model,
        PictureFiles(paths, card, settings.workers, settings.on_bad, settings.form, names),
        output_csv=output,
        batch_size=settings.batch_size,
        precision=run.precision,
        flip=settings.flip_test,
        channels_last=settings.channels_last,
        say=run.console.say,
        interrupted=run.interrupted,
    )
    return None if predictions is None else predictions.pictures


def predict_rows(run: Run, model, card: TextCard, output: Path) -> int | None:
    """The same for the file of texts that --predict names."""
    settings = run.settings
    return predict_texts(
        model,
        card,
        settings.predict,
        output_csv=output,
        text_columns=column_names(settings.text_columns),
        label_column=settings.label_column,
        batch_size=settings.batch_size,
        precision=run.precision,
        device=run.device,
        on_bad=settings.on_bad,
        encoding=None if settings.encoding == BY_ROW else settings.encoding,
        header=settings.header,
        interrupted=run.interrupted,
        say=run.console.say,
    )


# By the kinds of task in utils/tasks/kinds.py.
PREDICT: dict[str, Callable] = {"pictures": predict_pictures, "texts": predict_rows}
