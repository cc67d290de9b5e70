"""The table of strategies. To add one, write its file in utils/distributed/strategies/ and a line
here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyFacts:
    """What the flags need to know of a strategy.

    Attributes:
        place: of its class.
        summary: for `--help`.
        divides: a process holds a part of each parameter.
        unfreezes: parameters may begin to train in the course of a run.
    """

    place: str
    summary: str
    divides: bool = False
    unfreezes: bool = True


STRATEGIES = {
    "ddp": StrategyFacts(
        "utils.distributed.strategies.ddp:DDP", "every process has the whole model"
    ),
    "fsdp": StrategyFacts(
        "utils.distributed.strategies.fsdp:FSDP",
        "each process holds a part of every weight and of its optimizer state",
        divides=True,
        unfreezes=False,
    ),
}
