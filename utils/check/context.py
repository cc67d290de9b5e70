"""What all parts of a check share: the report, and an end for a part that fails or hangs."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..files import reason, replace_file
from ..launch.environment import note_exit_code
from ..reporting.console import aligned
from ..reporting.metrics import to_json
from ..runs.run import Run
from .machine import facts_of

SECONDS = 90  # that a part of the check may take
NETWORK = (
    "the processes do not reach each other: set the interface by GLOO_SOCKET_IFNAME, on GPUs by "
    "NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what NCCL uses; see docs/distributed.md, 'When it "
    "hangs'"
)
OK, NOTE, FAILS, SKIPPED = "ok", "note", "fails", "not checked"


class Report:
    """Collects and says what is found. Only `fails` makes the check fail."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.facts: dict = {"time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self.findings: list[dict[str, str]] = []

    def add(self, name: str, verdict: str, text: str) -> None:
        """Adds what was found by the check of this name, and what to do where that is needed."""
        self.findings.append({"name": name, "verdict": verdict, "text": text})
        self.say(f"{verdict.upper() if verdict == FAILS else verdict:<11} {name}: {text}")

    def table(self, rows: Sequence[tuple[str, ...]]) -> None:
        """Says the rows, the first of which has the headings, with aligned columns."""
        self.say("")
        for line in aligned(rows):
            self.say(line)
        self.say("")

    @property
    def failed(self) -> list[str]:
        """Names of the checks that have failed."""
        return [found["name"] for found in self.findings if found["verdict"] == FAILS]

    def write(self, path: Path) -> None:
        """Writes facts and findings; says where, or why not."""
        result = "fails" if self.failed else "ok"
        content = {"result": result, "findings": self.findings} | self.facts
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (to_json(content, indent=2) + "\n").encode())
        except OSError as error:
            self.say(f"note: {path}: {reason(error)}; there is no JSON file of this check")
            return
        self.say(f"all figures, for whoever helps you: {path}")


def amount(value: float, unit: str) -> str:
    """1.5e9, "B/s" -> "1.5 GB/s"; 2e-5, "s" -> "20 us"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-6:.3g} u{unit}"


@contextlib.contextmanager
def part_of_check(
    name: str,
    advice: str,
    missing: Callable[[], str] = lambda: "",
    before: Callable[[str], None] = lambda line: None,
    seconds: float = SECONDS,
) -> Iterator[None]:
    """Ends this process with exit code 1, after an error line, if the block does not end in time or
    raises a RuntimeError, as PyTorch does where communication or a GPU fails. On each host one
    process says it.

    Args:
        name: of this part of the check; the error line begins with it.
        advice: what the user looks at; the line ends with it.
        missing: returns text for the line: which processes do not respond.
        before: called with the line before the process ends.
    """

    def give_up(what: str) -> None:
        line = f"{name} {what}{missing()}: {advice}"
        if note_exit_code(1):
            print(f"error: {socket.gethostname()}: {line}", file=sys.stderr, flush=True)
        before(line)
        os._exit(1)

    timer = threading.Timer(seconds, give_up, (f"does not end within {seconds:g} s",))
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        timer.cancel()
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        give_up(f"fails ({cause})")
    finally:
        timer.cancel()


class Check:
    """A check that is going on. Making one is collective.

    Args:
        run: its processes, device and console.
        report: of this rank; that of the first is shown.
        path: of the JSON file.

    Attributes:
        ranks: the facts of all ranks; own: those of this one.
        hosts: their names, in the order of their first ranks.
    """

    def __init__(self, run: Run, report: Report, path: Path):
        self.run, self.report, self.path = run, report, path
        exchange = run.exchange
        self.own = facts_of(run.device, exchange.rank, run.threads, exchange.size > 1)
        self.ranks = exchange.gather_json(self.own)
        report.facts["ranks"] = self.ranks
        self.hosts = list(dict.fromkeys(rank["host"] for rank in self.ranks))

    def host(self, rank: int) -> str:
        return self.ranks[rank]["host"]

    def part(self, name: str, advice: str) -> contextlib.AbstractContextManager:
        """The context of a part of the check; `advice`: what to look at if it fails."""
        return part_of_check(name, advice, self._missing, self._write_unfinished)

    def _missing(self) -> str:
        silent = self.run.watch.silent() if self.run.watch is not None else []
        names = ", ".join(f"{rank} on {self.host(rank)}" for rank in silent)
        return f" (no response from rank {names})" if silent else ""

    def _write_unfinished(self, line: str) -> None:
        if self.run.leads:
            self.report.add("unfinished", FAILS, line)
            self.report.write(self.path)
