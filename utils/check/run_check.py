"""`--check`: what is there, whether it works, and how fast it is."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from utils.check import ranks
from utils.check.context import NETWORK, SECONDS, Check
from utils.check.device import check_device
from utils.check.patience import Patience
from utils.check.report import Report
from utils.launch.environment import note_exit_code
from utils.launch.signals import Signals
from utils.runs.run import Run


def run_check(settings, origin: dict, signals: Signals) -> int:
    """Checks this process, or all that were launched together. Returns the exit code: 1 if
    a check has failed."""
    patience = Patience()
    with _nccl_log() as log:
        with patience.part("joining the other processes", SECONDS, NETWORK):
            run = Run(settings, origin, signals, "check", "none")
        with run:
            report = Report(run.console.say)
            path = Path("runs") / time.strftime("check-%Y%m%d-%H%M%S.json")
            check = Check(run, report, patience, path)
            ranks.show_ranks(check)
            check_device(check)
            if run.exchange.size > 1:
                ranks.check_versions(check)
                ranks.check_clocks(check)
                ranks.check_collectives(check)
                ranks.check_transports(check, log)
                ranks.check_speeds(check)
                ranks.check_equality(check)
            ranks.check_folder(check)
            code = 1 if any(run.exchange.gather_json(bool(report.failed))) else 0
            if run.leads:
                _conclude(report, path)
    if code:
        note_exit_code(code)
    return code


def _conclude(report: Report, path: Path) -> None:
    failed = list(dict.fromkeys(report.failed))
    report.say("")
    report.say(f"failed: {', '.join(failed)}" if failed else "all checks have passed")
    report.write(path)


@contextlib.contextmanager
def _nccl_log() -> Iterator[Path | None]:
    """Makes NCCL write to a file what it uses, unless the user has asked for its log; yields the
    file. To be called before NCCL is used."""
    if os.environ.get("NCCL_DEBUG"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        file = Path(folder) / "nccl.log"
        own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
        os.environ.update(own)
        try:
            yield file
        finally:
            for name in own:
                del os.environ[name]
