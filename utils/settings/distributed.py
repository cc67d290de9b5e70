"""Flags of runs with several processes, and the table of strategies."""

from dataclasses import dataclass
from functools import partial

from ..errors import UserError
from ..optim.table import OPTIMIZERS
from ..setting import setting
from .actions import asked_for
from .config import Config

process_flag = partial(setting, group="many processes")


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


# To add one, write its file in utils/distributed/strategies/ and a line here.
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


@dataclass
class DistributedSettings(Config):
    distributed: bool = process_flag(
        False,
        "This process is one of several that train together; run_distributed.sh and torchrun "
        "set this",
        resume="free",
    )
    strategy: str = process_flag(
        "ddp",
        "; ".join(f"{name}: {facts.summary}" for name, facts in STRATEGIES.items()),
        choices=tuple(STRATEGIES),
        resume="free",
    )
    sync_bn: bool = process_flag(
        False,
        "Compute BatchNorm's statistics over the batches of all processes, instead of over each "
        "process's own",
    )
    global_batch: int | None = process_flag(
        None,
        "Samples in an optimizer step of all processes together, reached by accumulation",
        low=1,
        unit="samples",
        default_text="--batch_size times --accumulation_steps times the processes",
    )
    lr_base_size: int | None = process_flag(
        None,
        "Samples in the optimizer step that --lr is meant for; the learning rate is --lr times the "
        "actual number of samples in a step, divided by this",
        low=1,
        unit="samples",
        default_text="--lr as it is",
    )
    dist_timeout: float = process_flag(
        10.0,
        "End a process that has finished no step, and no batch of an evaluation, for this long; "
        "run_distributed.sh then restarts all processes",
        above=0, unit="minutes", resume="free",
    )  # fmt: skip

    def ineffective(self):
        yield from super().ineffective()
        if not self.distributed:
            # A process alone can train several workers, or go on with what they have trained.
            matters = self.strategy == "local" or self.resume is not None
            names = () if matters else ("strategy",)
            reason = "it is for --distributed, which run_distributed.sh sets"
            yield (*names, "dist_timeout", "sync_bn"), reason, "distributed"
        if self.global_batch is not None:
            if self.batch_tokens is not None:
                yield "global_batch", "--batch_tokens sets the batch by tokens", "batch_tokens"
            else:
                reason = "--global_batch decides how many batches are accumulated"
                yield "accumulation_steps", reason, "global_batch"

    def validate(self):
        super().validate()
        if not self.distributed:
            return
        for action in asked_for(vars(self)):
            if not action.many_processes:
                raise UserError(f"--{action.name} takes one process: do not use run_distributed.sh")
        if self.sync_bn and self.meta_exact:
            raise UserError(
                "--meta_exact differentiates twice, which --sync_bn cannot: leave one of them out"
            )
        facts = STRATEGIES[self.strategy]
        if facts.divides and not OPTIMIZERS[self.optimizer].can_be_divided:
            raise UserError(
                f"--optimizer {self.optimizer} needs whole matrices, which --strategy "
                f"{self.strategy} divides; take ddp, or --optimizer ngd or adamw"
            )
        if self.unfreeze_epoch is not None and not facts.unfreezes:
            raise UserError(
                f"--unfreeze_epoch: --strategy {self.strategy} cannot unfreeze a model; take ddp"
            )
