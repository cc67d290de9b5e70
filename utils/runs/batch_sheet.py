"""A training batch as the network sees it: a sheet of its pictures, or the tokens of its texts."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ..data.batch import Batch
from ..data.loader import Loader
from ..data.texts.tokenizer import tokenizer_from_json
from ..files import replace_file
from ..tasks.task import Task
from ..weights.card import ModelCard

COLUMNS, MOST = 8, 64  # pictures in a row, in a sheet
PICTURES, TEXTS = 16, 4  # on the page of a run
LEAST_SIDE = 64  # pixels: smaller pictures are enlarged, by a whole number
GAP = 2  # pixels between pictures


def write_sheet(path: Path, batch: Batch, card: ModelCard) -> None:
    """Writes the first pictures of the batch to a PNG file. Raises OSError."""
    sheet = tiled(pictures_of(batch, card, MOST))
    content = io.BytesIO()
    Image.fromarray(sheet.squeeze(2) if sheet.shape[2] == 1 else sheet).save(content, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue())


def first_batch(loader: Loader) -> Batch:
    """The first one that a run trains on."""
    loader = loader.with_features(None)
    with closing(loader.epoch(0)) as batches:
        return loader.made(next(batch for batch in batches if len(batch.targets)))


def pictures_of(batch: Batch, card: ModelCard, most: int) -> np.ndarray:
    """(n, height, width, channels) uint8: the first pictures of a batch, mixed if it is."""
    inputs, plan = batch.inputs, batch.mix_plan
    if plan is not None and not plan.lam_pending:
        inputs = plan.apply(inputs)
    return pixels(inputs[:most], card)


def first_samples(task: Task) -> Iterable:
    """The first PICTURES of the first batch, or TEXTS with spaces between their tokens."""
    batch: Any = first_batch(task.train)
    if isinstance(task.card, ModelCard):
        return pictures_of(batch, task.card, PICTURES)
    tokenizer, texts = tokenizer_from_json(task.card.tokenizer), batch.inputs.first(TEXTS)
    parts = texts.ids.cpu().split(texts.offsets.diff().tolist())[: texts.samples]
    return [" ".join(map(tokenizer.id_to_token, part.tolist())) for part in parts]


def pixels(inputs: Tensor, card: ModelCard) -> np.ndarray:
    """Normalised inputs (n, channels, height, width) -> (n, height, width, channels) uint8."""
    values = inputs.float().cpu().permute(0, 2, 3, 1).numpy()
    std = np.where(np.asarray(card.std) > 0, card.std, 1)
    return np.rint(255 * (values * std + card.mean)).clip(0, 255).astype(np.uint8)


def tiled(pictures: np.ndarray) -> np.ndarray:
    """(n, height, width, channels) uint8 -> (height, width, channels), COLUMNS in a row, on
    white."""
    times = max(1, -(-LEAST_SIDE // max(pictures.shape[1:3])))
    pictures = pictures.repeat(times, 1).repeat(times, 2)
    n, height, width, channels = pictures.shape
    columns, cell = min(n, COLUMNS), (height + GAP, width + GAP)
    sheet = np.full((-(-n // columns) * cell[0], columns * cell[1], channels), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * cell[0], i % columns * cell[1]
        sheet[top : top + height, left : left + width] = picture
    return sheet[:-GAP, :-GAP]
