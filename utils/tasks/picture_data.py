"""The pictures of a run: which are read, from where, and how they are divided into splits."""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..data.class_names import names_notes
from ..data.images.image_data import ImageData, PictureRequest, PictureSplit
from ..data.images.sources import load_image_data
from ..data.labels import key_of, relabelled
from ..data.splits import divide
from ..errors import UserError
from ..exchange import Exchange
from ..plural import counted
from ..reporting.console import Console
from ..settings import ImageSettings
from ..weights.card import ModelCard
from .task import counts_text

# What the settings and PictureRequest name alike.
OF_REQUEST = (
    *("image_size", "on_bad", "test_fraction", "decode", "form", "workers"),
    *("encoding", "image_column", "label_column", "image_dir"),
    *("group_column", "group_by", "val_fraction"),
)


class Splits(NamedTuple):
    """A data set, and what of it is used."""

    data: ImageData
    train: PictureSplit
    val: PictureSplit | None  # `data.test` itself if val/ is both


def load_splits(settings: ImageSettings, console: Console, exchange: Exchange, card) -> Splits:
    """Loads the pictures that the settings name, and divides them; says what there is.

    Args:
        exchange: with the other ranks.
        card: the ModelCard of the trained model for which all pictures of --eval_data are read;
            else not used.
    """
    measured = settings.eval_data
    if measured:
        settings = _for_all_of(measured, settings, card)
    with exchange.in_turn():  # one rank downloads and decodes, the others find it done
        request = PictureRequest(
            Path(settings.data_dir),
            Path(settings.cache_dir),
            classes=list(card.classes) if measured else None,
            **{name: getattr(settings, name) for name in OF_REQUEST},
        )
        data = load_image_data(settings.dataset, request)
    data = _take_val(data, settings, console)
    if settings.labels is not None:
        data = relabelled(
            data, Path(settings.labels), settings.encoding, Path(settings.data_dir),
            lambda _, split: [key_of(split.name(sample)) for sample in range(len(split))],
        )  # fmt: skip
    train, val = _divide(data, settings)
    if settings.eval_size not in (None, train.shape[0]):
        data, val = _resized(data, val, settings.eval_size)
    console.say(_description(data, None if measured else train, val))
    for note in [*data.notes, *names_notes(data.classes)]:
        console.say(f"note: {note}")
    return Splits(data, train, val)


def _for_all_of(path: str, settings: ImageSettings, card: ModelCard) -> ImageSettings:
    """Settings by which all of `path` is read for the trained model whose card this is."""
    if not os.path.exists(path):
        raise UserError(f"--eval_data {path}: there is no such file or folder")
    if card.channels != 3:
        raise UserError(f"--eval_data {path}: the model takes gray pictures; use --predict")
    kind = "csv" if os.path.isfile(path) else "imagefolder"
    changed: dict[str, Any] = {"dataset": kind, "data_dir": path, "image_size": card.height}
    changed |= dict.fromkeys(("eval_size", "test_fraction", "subset", "group_by", "group_column"))
    changed |= {"val_fraction": 0.0, "val_is_validation": False, "mixup": "none"}
    return dataclasses.replace(settings, **changed)


def _take_val(data: ImageData, settings: ImageSettings, console: Console) -> ImageData:
    """Makes a val/ folder without test/ beside it the validation split, with --val_is_validation;
    else says that it is the test set."""
    if settings.val_is_validation and not data.val_is_test:
        raise UserError(
            f"--val_is_validation is for train/ and val/ alone, which {settings.data_dir} does not "
            "have: leave the flag out"
        )
    if settings.val_is_validation:
        return dataclasses.replace(data, val=data.test)
    if data.val_is_test:
        console.say(
            "note: val/ is used as the test set and influences nothing; with --val_is_validation "
            "it becomes the validation split, which selects the best weights and controls early "
            "stopping"
        )
    return data


def _divide(data: ImageData, settings: ImageSettings) -> tuple[PictureSplit, PictureSplit | None]:
    """(training split, validation split): the data set's own, or one that is held out."""
    if settings.val_fraction and data.val is not None:
        raise UserError(
            f"--val_fraction: {settings.data_dir} has a validation split of its own; leave the "
            "flag out"
        )
    return divide(data, settings.val_fraction, settings.subset, settings.seed)


def _resized(data: ImageData, val: Any, size: int) -> tuple[ImageData, PictureSplit | None]:
    """`data` with encoded test pictures of another size, and the validation split likewise."""
    test = data.test.resized(size)  # type: ignore[attr-defined]  # encoded ones have it
    if val is not None:
        val = test if val is data.test else val.resized(size)
    return dataclasses.replace(data, test=test), val


def _description(data: ImageData, train: PictureSplit | None, val: PictureSplit | None) -> str:
    note = f", {counted(data.skipped, 'bad file')} left out" if data.skipped else ""
    test = None if val is data.test else data.test  # --val_is_validation
    counts = counts_text("pictures", train, val, test)
    return f"{data.name}{note}: {counts} of {len(data.classes)} classes from {data.source}"
