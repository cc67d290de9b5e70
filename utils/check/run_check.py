"""`--check`: what is there, whether it works, and how fast it is."""

import os
import time
from pathlib import Path

from ..launch.environment import note_exit_code
from ..launch.signals import Signals
from ..machine.packages import NEEDED, OF_GPUS, OPTIONAL, installed, missing_text
from ..runs.run import Run
from . import ranks
from .arithmetic import ALLOWED, how_computed, largest_differences
from .context import FAILS, NETWORK, NOTE, OK, Check, Report, amount, part_of_check
from .machine import unusable_gpu

FREE = 0.8  # a GPU with less free memory than this part is in use by others


def run_check(settings, origin: dict, signals: Signals) -> int:
    """Checks this process, or all that were launched together. Returns the exit code: 1 if
    a check has failed."""
    with part_of_check("joining the other processes", NETWORK):
        run = Run(settings, origin, signals, "check", "none")
    with run:
        report = Report(run.console.say)
        path = Path("runs") / time.strftime("check-%Y%m%d-%H%M%S.json")
        check = Check(run, report, path)
        ranks.show_ranks(check)
        check_device(check)
        if run.exchange.size > 1:
            ranks.check_versions(check)
            ranks.check_clocks(check)
            ranks.check_collectives(check)
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


# ---- what each rank does for itself -----------------------------------------------------------


def check_device(check: Check) -> None:
    """Collective, as the first rank reports what others have found."""
    report, device = check.report, check.run.device
    if check.run.settings.device != "cpu":
        problem = unusable_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if problem:
            report.add("GPU", FAILS, f"PyTorch cannot use it: {problem}")
    check_memory(check)
    with check.part("the fused modules", "Triton compiles its kernels; see the lines above"):
        differences = largest_differences(device)
    worst, holds = max(differences.values()), all(d <= ALLOWED for d in differences.values())
    report.facts["fused"] = differences
    text = f"as the plain ones to {worst:.1e}, {how_computed(device)}"
    report.add("fused modules", OK if holds else FAILS, text)
    missing = missing_text(NEEDED)
    text = "all that training needs are installed"
    report.add("packages", FAILS if missing else OK, missing or text)
    optional = OPTIONAL + (OF_GPUS if device.type == "cuda" else ())
    report.facts["packages"] = installed(NEEDED + optional)
    if missing := missing_text(optional):
        report.add("optional packages", NOTE, missing)
    else:
        report.add("optional packages", OK, "all are installed")
    add_findings_of_other_ranks(check)


def check_memory(check: Check) -> None:
    device, report = check.own["device"], check.report
    if device["type"] != "cuda":
        available = amount(check.own["memory_available_bytes"], "B")
        text = f"{available} available; cores: {check.own['cores']}, threads: {check.run.threads}"
        report.add("memory", OK, text)
        return
    free, total = device["memory_free_bytes"], device["memory_bytes"]
    text = f"{amount(free, 'B')} of {amount(total, 'B')} free"
    if free < FREE * total:
        report.add("memory", NOTE, f"{text}: other processes use this GPU (nvidia-smi)")
    else:
        report.add("memory", OK, text)


def add_findings_of_other_ranks(check: Check) -> None:
    """Adds what other ranks have found wrong with themselves to the report of the first."""
    told = check.run.exchange.gather_json(check.report.findings)
    said = {(found["name"], found["text"]) for found in told[0]}
    for rank, findings in enumerate(told[1:], 1):
        for found in findings:
            name, verdict, text = found["name"], found["verdict"], found["text"]
            if check.run.leads and verdict in (NOTE, FAILS) and (name, text) not in said:
                said.add((name, text))
                check.report.add(name, verdict, f"rank {rank} on {check.host(rank)}: {text}")
