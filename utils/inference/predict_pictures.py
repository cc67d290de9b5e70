"""Predictions of a trained model for unlabelled pictures: a CSV file with a row for each.

The pictures are decoded and normalised exactly as the training pictures were.
"""

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from ..data.images.decode import decode_all, not_readable, strict_pillow
from ..data.images.file_formats import unread_formats
from ..data.images.image_data import USUAL, Form
from ..data.images.imagefolder import walk
from ..data.images.loader import Normalize
from ..data.images.split_names import is_ignored
from ..errors import UserError
from ..machine.cores import usable_cores
from ..measures.outcomes import answers_of
from ..plural import counted
from ..reporting.answers import AnswerTable, table_file
from ..reporting.console import PLAIN_LINE_SECONDS
from ..reporting.csv_fields import safe_path
from ..training.objective import Precision
from ..training.views import mean_log_probabilities
from ..weights.card import ModelCard
from .predictions import not_a_number

# How a table of predictions begins, today and formerly.
HEADERS = codecs.BOM_UTF8 + b"file,predicted,probability,", b"file,class,probability\n"


def list_pictures(path: str | Path, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """The file `path`, or every picture below the folder `path`, sorted; links are followed.

    Hidden files and folders are left out, and, as in training, files that are no pictures by their
    names and contents, on which `say` is given a line. A damaged picture is found out when it is
    decoded.

    Raises:
        UserError: there is nothing at `path`, or no picture in it.
    """
    if os.path.isfile(path):
        return [str(path)]
    if not os.path.exists(path):
        raise UserError(f"--predict {path}: there is no such file or folder")
    strays: list[str] = []
    prefix = os.path.join(path, "")[:-1]
    pictures = sorted(file for file, *_ in walk(prefix, prefix, set(), strays))
    others = [file for file in strays if not is_ignored(os.path.basename(file))]
    if not pictures:
        raise UserError(f"--predict {path}: there are no pictures in this folder")
    if others:
        remarks = [f"such as {min(others)}", *unread_formats(others)]
        say(f"{counted(len(others), 'other file')} left out, {', '.join(remarks)}")
    return pictures


def is_predictions(path: str | Path) -> bool:
    """Whether the file is a table of predictions that `predict_images` has written."""
    with open(path, "rb") as file:
        return file.read(100).startswith(HEADERS)


def predict_images(
    model: nn.Module,
    files: "PictureFiles",
    *,
    output_csv: str | Path,
    batch_size: int,
    precision: Precision,
    views: str = "none",
    channels_last: bool = True,
    say: Callable[[str], None] = print,
    before_batch: Callable[[], None] = lambda: None,
) -> int:
    """Writes the answer to each picture into `output_csv`: see AnswerTable.

    Rows are in the order of `files.paths`.
    The encoding is UTF-8, with other bytes of a file name written as \\udcNN. Names that a
    spreadsheet would run as formulas are changed: the file `=1.png` to `./=1.png`, the class `=1`
    to `'=1`. `output_csv` is replaced only when all rows are written. A few chunks of pictures are
    in memory at a time.

    Args:
        model: on the device of `precision`; inputs (n, channels, height, width) -> logits (n,
            classes).
        batch_size: the largest number of pictures in a forward pass.
        views: average the probabilities over these views of each picture (see training/views.py).
        channels_last: memory order of the inputs.
        say: is given lines of progress (where there is no terminal) and a line on skipped files.
        before_batch: called before each forward pass; if it raises, no file is written.

    Returns:
        how many pictures were predicted.

    Raises:
        UserError: a file is not a picture, none can be decoded, the model does not take square
            pictures or gives NaN, or `output_csv` cannot be written.
    """
    card, names, total = files.card, files.names, len(files.paths)
    if card.height != card.width:
        raise UserError(
            f"--predict: the model takes pictures of {card.height}x{card.width}, and files of any "
            "shape are cropped and resized to squares only: train with square pictures"
        )
    normalize = Normalize(card.mean, card.std, card.width, precision.device, channels_last)
    terminal, told = sys.stderr.isatty(), time.monotonic()
    model.eval()
    written = 0  # names of a list that have a row
    predicted = 0  # pictures that have a class
    with (
        table_file(output_csv) as file,
        tqdm(
            desc="predicting", total=total, unit=" pictures", disable=not terminal, leave=False
        ) as bar,
        contextlib.closing(files.batches(batch_size)) as batches,
    ):
        table = AnswerTable(file, card.classes, ["file"])
        for done, rows, pictures in batches:
            before_batch()
            if rows:
                inputs = normalize(torch.from_numpy(pictures).to(precision.device))
                answers = answers_of(_predict(model, inputs, precision, views))
                for row, classes, p in zip(rows, *answers, strict=True):
                    if np.isnan(p).any():
                        raise not_a_number(files.paths[row])
                    if names:
                        for name in names[written:row]:
                            table.without_answer([name])
                        written = row + 1
                    name = names[row] if names else safe_path(files.paths[row])
                    table.answer([name], classes, p)
                predicted += len(rows)
            bar.update(done - bar.n)
            if not terminal and time.monotonic() - told >= PLAIN_LINE_SECONDS:
                told = time.monotonic()
                say(f"{done:,} of {total:,} pictures")
        for name in names[written:] if names else ():
            table.without_answer([name])
        if not predicted:
            example = f", such as {files.skipped[0]}" if files.skipped else ""
            raise UserError(
                f"--predict: none of the {total:,} files is a readable picture{example}"
            )
    if files.skipped:
        say(f"{counted(len(files.skipped), 'bad file')} left out, such as {files.skipped[0]}")
    return predicted


@dataclass
class PictureFiles:
    """Files, decoded by threads a few chunks ahead. To be read once.

    Attributes:
        card: of the model; gives the size and the channels of the decoded pictures.
        workers: threads; None: one per core.
        on_bad: "error" or "skip", for files that cannot be decoded.
        form: how a file becomes a picture.
        names: of the files of a list, each of which gets a row; None: `paths`, each that is read.
        skipped: "path: reason" for each file skipped so far.
    """

    paths: list[str]
    card: ModelCard
    workers: int | None = None
    on_bad: str = "error"
    form: Form = USUAL
    names: Sequence[str] | None = None
    skipped: list[str] = field(default_factory=list)

    def batches(self, size: int) -> Generator[tuple[int, list[int], np.ndarray]]:
        """Yields how many files are done after the batch, those left out included; numbers of
        paths; and their pictures, (n, height, width, channels) uint8, at most `size` each and
        perhaps none.

        Raises:
            UserError: a file cannot be decoded, and `on_bad` is "error".
        """
        workers = max(1, usable_cores() if self.workers is None else self.workers)
        decoded = decode_all(self.paths, self.card.height, workers, self.form, kept=False)
        done = 0
        with strict_pillow(), contextlib.closing(decoded) as chunks:
            for pictures, errors in chunks:
                rows = range(done, done + len(pictures) + len(errors))
                readable = self._readable(rows, errors)
                if self.card.channels == 1:
                    pictures = to_gray(pictures)
                # `or 1`: one empty batch, so that a chunk of bad files counts as done.
                for start in range(0, len(readable) or 1, size):
                    end = start + size
                    done = readable[end] if end < len(readable) else rows.stop
                    yield done, readable[start:end], pictures[start:end]

    def _readable(self, rows: range, errors: dict[int, str]) -> list[int]:
        for offset, why in errors.items():
            path = self.paths[rows[offset]]
            if self.on_bad == "error":
                raise not_readable(path, why, "files")
            self.skipped.append(f"{path}: {why}")
        return [row for offset, row in enumerate(rows) if offset not in errors]


def to_gray(pictures: np.ndarray) -> np.ndarray:
    """(n, height, width, 3) uint8 -> (n, height, width, 1) uint8."""
    luma = [np.asarray(Image.fromarray(picture).convert("L")) for picture in pictures]
    return np.stack(luma)[..., None] if luma else pictures[..., :1]


def _predict(model: nn.Module, inputs: Tensor, precision: Precision, views: str) -> np.ndarray:
    """The probabilities, (n, classes) float32."""
    with torch.inference_mode():
        with precision.autocast():
            logits = model(inputs)
            if views != "none":
                return mean_log_probabilities(model, inputs, logits, views).exp().cpu().numpy()
        return logits.float().softmax(1).cpu().numpy()
