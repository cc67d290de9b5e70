"""A checkpoint of a few numbers, and a store that keeps its warnings."""

import torch

from utils.checkpoints.checkpoint import Checkpoint, Checkpoints


def example(step=1, value=1.0) -> Checkpoint:
    model = {"a.weight": torch.full((3, 4), value), "a.count": torch.tensor(step)}
    optimizer = {"a.weight/momentum_buffer": torch.ones(3, 4)}
    return Checkpoint(step, {"step": step}, {"model": model, "optimizer": optimizer})


def quiet(folder, **options) -> Checkpoints:
    said = []
    store = Checkpoints(folder, warn=said.append, **options)
    store.said = said
    return store
