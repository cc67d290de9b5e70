"""Evaluated samples that are nearly the same as training samples, which flatters the figures."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np

from ..data.images.decoded import kept

MOST = 200_000  # samples of a split; their vectors take 1 KB each
CHUNK = 256  # samples that are compared at a time


def near_copies(model, split: str, seconds: float, cache: Path) -> list[list[int]] | None:
    """[evaluated sample, training sample] of each evaluated one that has a near copy, from the
    folder `cache` if it is there. None: that would take longer than `seconds`.

    Args:
        model: of simple_models.py, whose `vectors` of nearly equal samples correlate by `alike`.
    """
    end = time.monotonic() + seconds

    def pieces(samples: int):
        for start in range(0, samples, CHUNK):
            if time.monotonic() > end or samples > MOST:
                raise TimeoutError
            yield np.arange(start, min(start + CHUNK, samples))

    def vectors(name: str) -> np.ndarray:
        """(samples, k) float32, of mean 0 and length 1, so that products are correlations."""
        parts = [model.vectors(name, index) for index in pieces(len(model.splits[name]))]
        found = np.concatenate(parts, dtype=np.float32)
        found -= found.mean(1, keepdims=True)
        return found / np.linalg.norm(found, axis=1, keepdims=True).clip(1e-6)

    def compare() -> list[list[int]]:
        trained, tested, pairs = vectors("train"), vectors(split), []
        for index in pieces(len(tested)):
            alike = tested[index] @ trained.T
            rows = np.flatnonzero(alike.max(1) > model.alike)
            pairs += np.stack([index[rows], alike[rows].argmax(1)], 1).tolist()
        return pairs

    content = json.dumps([model.title, model.identity, model.alike, split])
    key = hashlib.sha256(content.encode()).hexdigest()
    try:
        return kept(cache / f"near-{key[:16]}.json", compare)
    except TimeoutError:
        return None
