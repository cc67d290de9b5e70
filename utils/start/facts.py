"""What the data are: how many samples, of which classes and of what size."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..data.texts.sources import open_text_data
from ..exchange import Exchange
from ..plural import counted
from ..settings import ImageSettings, TextSettings
from ..tasks.picture_data import load_splits
from ..tasks.text_data import text_request

SMALL = 64  # pixels of a side
SAMPLE = 2000  # texts whose length is measured
# A tenth of the words of English texts are these, and of others few.
ENGLISH = {"the", "of", "and", "to", "in", "is", "for", "a", "on", "with", "it", "that"}


@dataclass(frozen=True)
class Facts:
    """
    Attributes:
        train, test: numbers of samples.
        counts: training samples of each class, by its name.
        size: pixels of a side, at which large pictures are read; or words of a usual text.
        english: the texts are.
    """

    train: int
    test: int
    counts: dict[str, int]
    size: int
    english: bool = False

    def in_words(self, kind: str) -> str:
        """What there is to train on; `kind` is "pictures" or "texts"."""
        low, high = (f(self.counts, key=self.counts.__getitem__) for f in (min, max))
        each = f"each of {self.counts[low]:,}"
        if self.counts[low] != self.counts[high]:
            each = (
                f"from {self.counts[low]:,} of {low[:40]} to {self.counts[high]:,} of {high[:40]}"
            )
        size = f"about {self.size} words each"
        if kind == "pictures":
            size = f"{self.size} pixels a side" if self.size <= SMALL else f"above {SMALL} pixels"
        return (
            f"{self.train:,} to train on and {self.test:,} to test on, {size}, in "
            f"{counted(len(self.counts), 'class')}, {each}"
        )


def facts_of(settings: ImageSettings | TextSettings) -> Facts:
    """Reads the data that the settings name, as the run will. Raises UserError likewise."""
    measure: Callable = _of_texts if isinstance(settings, TextSettings) else _of_pictures
    return measure(settings)


def _of_pictures(settings: ImageSettings) -> Facts:
    if settings.decode == "auto":  # they are decoded once their size is chosen
        settings = replace(settings, decode="always")
    silent: Any = SimpleNamespace(say=lambda line: None)
    splits = load_splits(settings, silent, Exchange(), None)
    return _facts(splits.data, splits.train.labels, max(splits.train.shape[:2]))


def _of_texts(settings: TextSettings) -> Facts:
    data = open_text_data(settings.dataset, text_request(settings)).load()
    some = [text.lower().split() for text in data.train.texts[:: len(data.train) // SAMPLE + 1]]
    words = Counter(word for text in some for word in text)
    english = sum(words[word] for word in ENGLISH) > 0.1 * words.total()
    size = round(statistics.median(map(len, some)))
    return replace(_facts(data, data.train.labels, size), english=english)


def _facts(data, labels: np.ndarray, size: int) -> Facts:
    counts = np.bincount(labels, minlength=len(data.classes)).tolist()
    return Facts(len(labels), len(data.test), dict(zip(data.classes, counts, strict=True)), size)
