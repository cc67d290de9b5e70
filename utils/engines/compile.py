"""`--compile`: the model is compiled by torch.compile, and TrainStep takes the steps."""

from collections.abc import Callable

import torch

from utils.distributed.strategies.base import Strategy
from utils.engines.eager import Eager
from utils.reporting.console import Console


class Compile(Eager):
    """An Engine for any run."""

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        return torch.compile(strategy.called)
