"""Evaluated samples that are nearly the same as training samples."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from utils.data.images.decoded import DecodedSplit
from utils.data.texts.token_store import TokenSplit
from utils.tasks import near_copies as module
from utils.tasks.near_copies import near_copies
from utils.tasks.simple_models import PixelModel, WordModel


def noise(seed: int, count: int = 1, side: int = 8) -> np.ndarray:
    """Pictures of 32x32 pixels, of blocks of random colours."""
    blocks = np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return blocks.repeat(32 // side, 1).repeat(32 // side, 2)


def picture_model(train: np.ndarray, test: np.ndarray, rows: np.ndarray | None = None):
    labels = np.zeros(len(train) if rows is None else len(rows), np.int64)
    splits = {"train": DecodedSplit(train, labels, rows)}
    return PixelModel(splits | {"test": DecodedSplit(test, np.zeros(len(test), np.int64))}, "f")


def changed(picture: np.ndarray) -> np.ndarray:
    """Brighter, of less contrast, and smaller for a while."""
    small = Image.fromarray((picture * 0.7 + 60).astype(np.uint8)).resize((24, 24))
    return np.asarray(small.resize((32, 32)))


@pytest.mark.parametrize("chunk", [3, 256])
def test_pictures(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    train, test = noise(0, 20), noise(1, 9)
    test[2], test[7] = train[11], changed(train[4])
    test[5] = 90  # of one colour, as is a training picture
    train[6] = 17
    assert near_copies(picture_model(train, test), "test", 60, tmp_path) == [[2, 11], [7, 4]]
    rows = np.arange(4, 19)
    found = near_copies(picture_model(train, test, rows), "test", 60, tmp_path)
    assert found == [[2, 7], [7, 0]]


def test_gray_pictures_and_splits_that_are_too_large(tmp_path, monkeypatch):
    train, test = noise(0, 20)[..., :1], noise(1, 9)[..., :1]
    test[8] = train[19]
    assert near_copies(picture_model(train, test), "test", 60, tmp_path / "a") == [[8, 19]]
    monkeypatch.setattr(module, "MOST", 19)
    assert near_copies(picture_model(train, test), "test", 60, tmp_path / "b") is None


def text_model(train: list[list[int]], test: list[list[int]]) -> WordModel:
    """Of texts that are token ids, without a class token."""
    splits = {}
    for name, texts in {"train": train, "test": test}.items():
        offsets = np.cumsum([0, *map(len, texts)])
        tokens = np.array([token for text in texts for token in text], np.uint16)
        splits[name] = TokenSplit(tokens, offsets, np.zeros(len(texts), np.int64))
    data = SimpleNamespace(splits=splits, fingerprint="f", files={}, vocab_size=1000)
    return WordModel(data, None)


def test_texts(tmp_path):
    generator = np.random.default_rng(0)
    train, test = (generator.integers(1, 900, (n, 30)).tolist() for n in (40, 10))
    test[3] = train[8][::-1] + train[8][:5]  # other order, repeated words
    test[6] = [950, 951, *train[20][2:]]  # words that are not in the training texts
    test[7] = train[21][:15] + test[7][15:]  # half of it
    assert near_copies(text_model(train, test), "test", 60, tmp_path) == [[3, 8], [6, 20]]


def test_they_are_found_in_time_or_not_at_all_and_kept(tmp_path, monkeypatch):
    model = picture_model(noise(0, 4), noise(0, 2))
    assert near_copies(model, "test", -1, tmp_path) is None
    assert not any(tmp_path.iterdir())
    found = near_copies(model, "test", 60, tmp_path)
    monkeypatch.setattr(model, "inputs", None)
    assert near_copies(model, "test", -1, tmp_path) == found and len(found) == 2
