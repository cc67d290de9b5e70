"""The sheet of a training batch that --dry_run draws."""

import numpy as np
import pytest
import torch
from PIL import Image

from utils.data.batch import Batch
from utils.data.images.loader import Normalize
from utils.mixup.mixing import MixPlan
from utils.runs.batch_sheet import COLUMNS, GAP, LEAST_SIDE, MOST, write_sheet
from utils.weights.card import ModelCard

CPU, SIDE = torch.device("cpu"), 16
TIMES = LEAST_SIDE // SIDE


def batch(pictures: np.ndarray, card: ModelCard, plan=None) -> Batch:
    inputs = Normalize(card.mean, card.std, SIDE, CPU)(torch.from_numpy(pictures))
    return Batch(inputs, torch.zeros(len(pictures)), len(pictures), True, plan)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_as_before_normalisation(tmp_path, channels):
    card = ModelCard(("a", "b"), (0.4,) * channels, (0.2,) * channels, SIDE, SIDE, channels)
    shape = (MOST + 5, SIDE, SIDE, channels)
    pictures = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_sheet(tmp_path / "new" / "sheet.png", batch(pictures, card), card)
    sheet = np.asarray(Image.open(tmp_path / "new" / "sheet.png")).reshape(-1, 8 * 66 - 2, channels)
    cell = SIDE * TIMES + GAP
    assert sheet.shape[0] == MOST // COLUMNS * cell - GAP
    for number in (0, 9, MOST - 1):
        top, left = number // COLUMNS * cell, number % COLUMNS * cell
        drawn = sheet[top : top + SIDE * TIMES : TIMES, left : left + SIDE * TIMES : TIMES]
        assert np.array_equal(drawn, pictures[number])


def test_they_are_mixed(tmp_path):
    card = ModelCard(("a", "b"), (0.5,) * 3, (0.25,) * 3, SIDE, SIDE, 3)
    pictures = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    pictures[1] = 200
    plan = MixPlan(torch.tensor([1, 0]), torch.tensor([0.75, 0.75]))
    write_sheet(tmp_path / "sheet.png", batch(pictures, card, plan), card)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet[0, 0, 0] == 50 and sheet[0, -1, 0] == 150
