"""The part of a check that each rank does for itself: GPU, memory, fused modules, packages."""

import os

from utils.check.context import Check
from utils.check.kernels import ALLOWED, how_computed, largest_differences
from utils.check.machine import unusable_gpu
from utils.check.report import FAILS, NOTE, OK, amount
from utils.machine.packages import NEEDED, OF_GPUS, OPTIONAL, installed, missing_text

FREE = 0.8  # a GPU with less free memory than this part is in use by others


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
    of_other_ranks(check)


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


def of_other_ranks(check: Check) -> None:
    """Adds what other ranks have found wrong with themselves to the report of the first."""
    told = check.run.exchange.gather_json(check.report.findings)
    said = {(found["name"], found["text"]) for found in told[0]}
    for rank, findings in enumerate(told[1:], 1):
        for found in findings:
            name, verdict, text = found["name"], found["verdict"], found["text"]
            if check.run.leads and verdict in (NOTE, FAILS) and (name, text) not in said:
                said.add((name, text))
                check.report.add(name, verdict, f"rank {rank} on {check.host(rank)}: {text}")
