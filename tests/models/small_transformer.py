"""A small Transformer, and texts for it: packed and padded."""

import numpy as np
import torch

from utils.models.transformer import Transformer
from utils.packed import pack

CPU = torch.device("cpu")
SIZES = {"vocab_size": 50, "classes": 3, "layers": 2, "dim": 16, "heads": 4, "ffn": 24}
SIZES |= {"max_len": 12}
WAYS = [("cls", "sentence"), ("cls", "embeddings"), ("mean", "sentence"), ("mean", "embeddings")]


def model(seed=0, dtype=torch.float32, dropout=0.0, **settings):
    torch.manual_seed(seed)
    made = Transformer(**(SIZES | {"dropout": dropout} | settings)).to(dtype)
    for parameter in made.parameters():  # so that no scale is 1 and no bias 0
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return made


def texts(lengths, seed=0):
    """Random texts of these lengths: lists of ids that start with 1."""
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(2, 50, length - 1).tolist()] for length in lengths]


def packed(samples):
    tokens = np.concatenate([np.array(ids, np.uint16) for ids in samples])
    lengths = np.array([len(ids) for ids in samples])
    return pack(tokens, np.cumsum(lengths) - lengths, lengths, CPU)


def padded(samples, extra=0):
    longest = max(map(len, samples)) + extra
    return torch.tensor([ids + [0] * (longest - len(ids)) for ids in samples])
