"""Made-up texts, with lengths and words as in AG News, and made-up pictures."""

import numpy as np
import torch

CPU = torch.device("cpu")
TOPICS = 4
CLS = 1  # the first token of every text
# Mean and standard deviation of CIFAR-10's channels.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def lengths_like_news(n: int, max_len: int, generator: np.random.Generator) -> np.ndarray:
    """(n,) int64, tokens: 45 on average, one text in a hundred three times as long or more."""
    body = generator.normal(44, 10, n)
    tail = generator.lognormal(4.0, 0.6, n)
    lengths = np.where(generator.random(n) < 0.05, tail, body)
    return np.clip(lengths, 8, max_len).astype(np.int64)


def texts(lengths: np.ndarray, vocabulary: int, generator: np.random.Generator) -> tuple:
    """(tokens, offsets, labels); the frequency of a word falls with its rank, by Zipf's law."""
    offsets = np.append(0, np.cumsum(lengths))
    frequency = 1 / np.arange(1, vocabulary - 1)
    tokens = 2 + generator.choice(vocabulary - 2, offsets[-1], p=frequency / frequency.sum())
    tokens[offsets[:-1]] = CLS
    return tokens.astype(np.uint16), offsets, generator.integers(0, TOPICS, len(lengths))


def pictures(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(n, 32, 32, 3) uint8, and labels of ten classes."""
    images = generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, n)


def random_batch(n: int) -> torch.Tensor:
    """(n, 3, 32, 32) float32, channels_last, normally distributed."""
    return torch.randn(n, 3, 32, 32).to(memory_format=torch.channels_last)
