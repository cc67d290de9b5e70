"""The table of strategies. To add one, write its file in utils/distributed/strategies/ and a line
here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyFacts:
    """What the flags need to know of a strategy.

    Attributes:
        place: where its class is, as module:name; None: a process steps as if it were alone.
        summary: for `--help`.
        divides: each process holds a part of every parameter.
        unfreezes: frozen parameters may begin to train during a run.
    """

    place: str | None
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
    "local": StrategyFacts(
        None,  # what workers exchange is averaged by LocalSteps
        "every process has whole models, which step by themselves and average their weights at "
        "times (see local steps)",
    ),
}
