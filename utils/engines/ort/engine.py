"""`--engine ort`: which runs it serves."""

from torch import nn

from utils.distributed.strategies.base import Strategy
from utils.engines.engine import Engine, RunFacts
from utils.engines.ort.module import OrtModule
from utils.engines.ort.session import why_missing
from utils.reporting.console import Console


class Ort(Engine):
    """An Engine for a CPU in float32. utils/settings/engine.py refuses the flags that exclude it;
    OrtModule refuses models that it cannot train."""

    def why_not(self, facts: RunFacts) -> str | None:
        if facts.device.type != "cpu":
            return "it computes on a CPU only: add --device cpu"
        return why_missing()

    def wrap(self, strategy: Strategy, console: Console) -> nn.Module:
        return strategy.substitute(OrtModule(strategy.model, console.say))
