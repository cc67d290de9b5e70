"""`--strategy local`: local steps."""

from utils.distributed.strategies.base import Strategy
from utils.exchange import Exchange


class Local(Strategy):
    """Every worker steps as a process alone does. What workers exchange is averaged by LocalSteps
    (utils/training/local_steps.py), since a process may train several of them in turn."""

    def __init__(self, exchange: Exchange | None = None):
        """Ignores `exchange`, with which all strategies are made: a worker steps as if its process
        were alone."""
        super().__init__(Exchange())
