"""Evaluated samples that are nearly the same as training samples, which flatters the figures: found
by classical means, within a time limit."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..data.images.decoded import kept
from ..data.texts.token_store import TokenSplit
from .simple_models import PixelModel, WordModel

VERSION = 1  # of what is found; part of the name of the file that keeps it
MOST = 100_000  # samples of a split that are compared
CHUNK = 256  # samples compared at a time
# Pictures are nearly the same if they correlate as much when shrunk to so many gray pixels a side.
# Of 40 pairs found in CIFAR-10 39 show the same scene; with a difference hash of 64 bits, at a
# distance of 3, as few are wrong, but 29 are found, and half of all scanned digits.
SIDE, CORRELATION = 16, 0.98
# Texts, if their sets of tokens share this part of their union. Texts are compared with up to TRIED
# of those with which they share one of their RAREST tokens.
SHARED, RAREST, TRIED = 0.8, 6, 5

Pairs = list[list[int]]


def near_copies(model, split: str, seconds: float, cache: Path) -> Pairs | None:
    """[evaluated sample, training sample] of each evaluated one that has a near copy, from the
    folder `cache` if it is there. None: that would take longer than `seconds`.

    Args:
        model: of simple_models.py, which reads the samples.
    """
    end = time.monotonic() + seconds

    def in_time() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    def found() -> Pairs:
        alike = _alike_texts if isinstance(model, WordModel) else _alike_pictures
        indices = [_spread(len(model.splits[name])) for name in (split, "train")]
        pairs = alike(model, split, indices, in_time)
        return [[int(indices[0][i]), int(indices[1][j])] for i, j in pairs]

    content = json.dumps([VERSION, model.title, model.identity, split])
    key = hashlib.sha256(content.encode()).hexdigest()
    try:
        return kept(cache / f"near-{key[:16]}.json", found)
    except TimeoutError:
        return None


def _spread(samples: int) -> np.ndarray:
    """MOST of the samples, or all."""
    return np.unique(np.linspace(0, samples - 1, min(samples, MOST)).astype(int))


def _alike_pictures(
    model: PixelModel, split: str, indices: list[np.ndarray], in_time: Callable[[], None]
) -> Iterator[tuple[int, int]]:
    def standardized(name: str, index: np.ndarray) -> np.ndarray:
        """(n, pixels) float32, of mean 0 and length 1, so that products are correlations."""
        parts = []
        for start in range(0, len(index), CHUNK):
            in_time()
            values = model.inputs(name, index[start : start + CHUNK], SIDE)
            gray = values.reshape(len(values), SIDE * SIDE, -1).mean(2)
            gray -= gray.mean(1, keepdims=True)
            length = np.linalg.norm(gray, axis=1, keepdims=True)
            parts.append((gray / np.maximum(length, 1e-6)).astype(np.float32))
        return np.concatenate(parts)

    tested, trained = (standardized(*one) for one in zip((split, "train"), indices, strict=True))
    for start in range(0, len(tested), CHUNK):
        in_time()
        correlations = tested[start : start + CHUNK] @ trained.T
        for row in np.flatnonzero(correlations.max(1) > CORRELATION):
            yield start + row, correlations[row].argmax()


def _alike_texts(
    model: WordModel, split: str, indices: list[np.ndarray], in_time: Callable[[], None]
) -> Iterator[tuple[int, int]]:
    tested, trained = model.splits[split], model.splits["train"]
    counts = np.bincount(trained.tokens, minlength=model.data.vocab_size)

    def sets(samples: TokenSplit, index: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each sample's place in the index, and its tokens, the rarest ones first."""
        for place, sample in enumerate(index.tolist()):
            in_time()
            tokens = np.unique(samples.tokens[slice(*samples.offsets[sample : sample + 2])])
            yield place, tokens[np.argsort(counts[tokens], kind="stable")]

    def rarest(tokens: np.ndarray) -> list[int]:
        return tokens[counts[tokens] > 0][:RAREST].tolist()

    having: dict[int, list[int]] = defaultdict(list)
    for place, tokens in sets(trained, indices[1]):
        for token in rarest(tokens):
            having[token].append(place)
    for place, tokens in sets(tested, indices[0]):
        candidates = Counter(j for token in rarest(tokens) for j in having.get(token, ()))
        own = set(tokens.tolist())
        for j, _ in candidates.most_common(TRIED):
            _, other = next(sets(trained, indices[1][j : j + 1]))
            if len(own & (theirs := set(other.tolist()))) >= SHARED * len(own | theirs):
                yield place, j
                break
