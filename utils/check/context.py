"""What all parts of a check share."""

import contextlib
from pathlib import Path

from utils.check.machine import facts_of
from utils.check.patience import Patience
from utils.check.report import FAILS, Report
from utils.runs.run import Run

SECONDS = 90  # that a part of the check may take
NETWORK = (
    "the processes do not reach each other: set the interface by GLOO_SOCKET_IFNAME, on GPUs by "
    "NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what NCCL uses; see docs/distributed.md, 'When it "
    "hangs'"
)


class Check:
    """A check that is going on. Making one is collective.

    Args:
        run: its processes, device and console.
        report: of this rank; that of the first is shown.
        patience: ends the process if a part fails or does not end.
        path: of the JSON file.

    Attributes:
        ranks: the facts of all ranks; own: those of this one.
        hosts: their names, in the order of their first ranks.
    """

    def __init__(self, run: Run, report: Report, patience: Patience, path: Path):
        self.run, self.report, self.patience, self.path = run, report, patience, path
        exchange = run.exchange
        self.own = facts_of(run.device, exchange.rank, run.threads, exchange.size > 1)
        self.ranks = exchange.gather_json(self.own)
        report.facts["ranks"] = self.ranks
        self.hosts = list(dict.fromkeys(rank["host"] for rank in self.ranks))

    def host(self, rank: int) -> str:
        return self.ranks[rank]["host"]

    def part(self, name: str, advice: str) -> contextlib.AbstractContextManager:
        """The context of a part of the check; `advice`: what to look at if it fails."""
        return self.patience.part(name, SECONDS, advice, self._missing, self._write_unfinished)

    def _missing(self) -> str:
        silent = self.run.watch.silent() if self.run.watch is not None else []
        names = ", ".join(f"{rank} on {self.host(rank)}" for rank in silent)
        return f" (no response from rank {names})" if silent else ""

    def _write_unfinished(self, line: str) -> None:
        if self.run.leads:
            self.report.add("unfinished", FAILS, line)
            self.report.write(self.path)
