"""A sheet of the pictures of a training batch, as the network sees them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from ..data.batch import Batch
from ..files import replace_file
from ..weights.card import ModelCard

COLUMNS, MOST = 8, 64  # pictures in a row, in a sheet
LEAST_SIDE = 64  # pixels: smaller pictures are enlarged, by a whole number
GAP = 2  # pixels between pictures


def write_sheet(path: Path, batch: Batch, card: ModelCard) -> None:
    """Writes the first pictures of the batch, mixed if it is, to a PNG file.

    Args:
        card: how they are normalised.

    Raises:
        OSError: the file cannot be written.
    """
    inputs, plan = batch.inputs, batch.mix_plan
    if plan is not None and not plan.lam_pending:
        inputs = plan.apply(inputs)
    sheet = tiled(pixels(inputs[:MOST], card))
    content = io.BytesIO()
    Image.fromarray(sheet.squeeze(2) if sheet.shape[2] == 1 else sheet).save(content, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue())


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
