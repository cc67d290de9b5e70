"""`--compile`: the model is compiled by torch.compile, and TrainStep takes its own steps."""

from collections.abc import Callable

import torch

from utils.engines.eager import Eager


class Compile(Eager):
    """An Engine for any run."""

    def wrap(self, model: Callable) -> Callable:
        return torch.compile(model)
