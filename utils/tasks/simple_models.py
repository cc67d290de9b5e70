"""Simple classifiers of texts and of pictures, by scikit-learn: the baselines beside a result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from ..data.splits import divide
from ..data.texts.sources import open_text_data
from ..data.texts.token_store import TokenizedData
from ..errors import UserError
from ..settings import TextSettings
from .text_data import text_request

SIDE = 8  # of a shrunk picture; CIFAR-10 gives 40.7 %, with 16 pixels 39.6 % in twice the time
COMPARED = 16  # of one that is compared with others, whose vectors then have 256 elements


class WordModel:
    """Logistic regression on the frequencies of words, in texts as they stand in their files.

    Attributes:
        iterations: of logistic regression, at most.
        features: the class of scikit-learn that makes them of the inputs.
        splits: by name, with their `labels`.
        identity: what tells these samples from others, for JSON.
        files: that the first call of `inputs` reads.
        alike: correlation of the `vectors` of samples that are nearly the same.
    """

    title, iterations = "TF-IDF with logistic regression", 1000
    alike = 0.9
    features = "sklearn.feature_extraction.text:TfidfVectorizer"

    def __init__(self, data: TokenizedData, settings: TextSettings):
        self.data, self.settings, self.splits = data, settings, data.splits
        self.identity, self.files = [data.fingerprint], [*data.files.values()]
        self._texts: dict[str, list[str]] = {}
        self._directions: np.ndarray | None = None

    def inputs(self, split: str, index: np.ndarray) -> list[str]:
        """Of the samples `index` (n,) int64 of a split. UserError: they cannot be read again."""
        # Rows without text after cleaning are not among the samples: then texts are cleaned.
        if not (self._texts or self._read(clean=False) or self._read(clean=True)):
            raise UserError("the files are no longer those that were trained on")
        return [self._texts[split][sample] for sample in index.tolist()]

    def vectors(self, split: str, index: np.ndarray) -> np.ndarray:
        """(n, 256): sums of a random direction for each different token, by which texts correlate
        as much as they share tokens."""
        samples, shape = self.splits[split], (self.data.vocab_size, COMPARED**2)
        if self._directions is None:
            self._directions = np.random.default_rng(0).standard_normal(shape, np.float32)
        borders = (slice(*samples.offsets[i : i + 2]) for i in index.tolist())
        return np.stack([self._directions[np.unique(samples.tokens[b])].sum(0) for b in borders])

    def _read(self, clean: bool) -> bool:
        """Whether what is read are the samples of the splits."""
        settings, request = self.settings, replace(text_request(self.settings), clean=clean)
        data = open_text_data(self.data.name, request).load()
        train, val = divide(data, settings.val_fraction, settings.subset, settings.seed)
        found = {"train": train, "test": data.test, "val": val}
        if all(np.array_equal(found[k].labels, self.splits[k].labels) for k in self.splits):
            self._texts = {name: found[name].texts for name in self.splits}
        return bool(self._texts)


class PixelModel:
    """Logistic regression on the pixels of shrunk pictures, PictureSplits; else as WordModel."""

    title, iterations = f"logistic regression on {SIDE}x{SIDE} pixels", 100  # more are no better
    features = "sklearn.preprocessing:StandardScaler"
    alike = 0.98  # of 39 pairs in CIFAR-10 38 show one scene; from 0.97 on, of 78 pairs 74

    def __init__(self, splits: Mapping[str, Any], fingerprint: str):
        self.splits, self.files, self.identity = splits, [], [fingerprint]
        for split in (split for split in splits.values() if split.rows is not None):
            self.identity.append(hashlib.sha256(split.rows).hexdigest())

    def vectors(self, split: str, index: np.ndarray) -> np.ndarray:
        """(n, 256): gray pixels. UserError: a picture cannot be read."""
        return self.inputs(split, index, COMPARED).reshape(len(index), COMPARED**2, -1).mean(2)

    def inputs(self, split: str, index: np.ndarray, side: int = SIDE) -> np.ndarray:
        """(n, pixels) float64, row by row. UserError: a picture cannot be read."""
        samples = self.splits[split]
        rows = index if samples.rows is None else samples.rows[index]
        if samples.encoded:
            samples = samples.resized(side)
        pictures = (Image.fromarray(samples.picture(row).squeeze()) for row in rows.tolist())
        small = [one.resize((side, side), Image.Resampling.BOX) for one in pictures]
        return np.stack([np.asarray(one, float).ravel() for one in small])
