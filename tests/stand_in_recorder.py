"""A recorder of CUDA graphs for machines without a GPU."""

import contextlib
from types import SimpleNamespace

import torch
from toy import make_trainer, use_graphs


class StandIn:
    """A recorder that captures nothing: a replay calls the function.

    Args:
        failure: message of the error of every capture; empty: none fails.
        waits: where the host waits in a watched step.
        step_ms: time of a step on the device.
    """

    def __init__(self, failure: str = "", waits: tuple = (), step_ms: float = 0.0):
        self.failure, self.waits, self.step_ms = failure, waits, step_ms
        self.warm = self.watches = self.captured = self.replayed = self.paced = 0

    @contextlib.contextmanager
    def warm_up(self):
        self.warm += 1
        yield

    @contextlib.contextmanager
    def watched(self):
        self.watches += 1
        places = []
        yield places
        places += self.waits

    def capture(self, function):
        if self.failure:
            raise RuntimeError(self.failure)
        self.captured += 1

        def replay():
            self.replayed += 1
            function()

        return replay

    def keep_pace(self):
        self.paced += 1

    def mark(self):
        return SimpleNamespace(query=lambda: True, elapsed_time=lambda end: self.step_ms)


def graphed(folder, failure="", asked=True, step_ms=0.0, rate_dtype=torch.float64, **options):
    trainer, recorder = make_trainer(folder, **options), StandIn(failure, step_ms=step_ms)
    use_graphs(trainer, recorder, asked, rate_dtype)
    return trainer, recorder
