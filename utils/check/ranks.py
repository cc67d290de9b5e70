"""The parts of a check that all ranks do together."""

import contextlib
import dataclasses
import os
import statistics
import time
import uuid
from collections import Counter
from pathlib import Path

from ..distributed.collectives import COLLECTIVES, measure
from ..exchange import Exchange
from ..files import reason
from .arithmetic import (
    ALLOWED_IN_FLOAT64,
    difference_from_one,
    matrix_speed,
    slowest,
)
from .context import FAILS, NETWORK, NOTE, OK, SKIPPED, Check, amount

CLOCKS = 2.0  # seconds by which the clocks of hosts may differ: see docs/distributed.md
SLOW = 0.7  # a GPU below this part of the median speed fails the check
SAME = ("torch", "cuda", "nccl", "code")  # what must be the same on all ranks
LIKE = ("python", "driver")  # what had better be
ROUNDS = 9  # of comparing clocks
PATIENCE = 10.0  # seconds in which a file must appear on other hosts, as NFS keeps listings


def show_ranks(check: Check) -> None:
    """A row for each host."""
    headings = ("host", "ranks", "devices", "driver", "PyTorch", "CUDA", "NCCL", "network")
    rows: list[tuple[str, ...]] = [headings]
    for host in check.hosts:
        members = [rank for rank in check.ranks if rank["host"] == host]
        numbers = [rank["rank"] for rank in members]
        devices = Counter(rank["device"]["name"] for rank in members)
        network = members[0].get("network")
        rows.append((
            host,
            f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
            ", ".join(f"{count} x {name}" for name, count in devices.items()),
            *(_values(members, key) for key in ("driver", "torch", "cuda", "nccl")),
            network["interface"] if network else "-",
        ))  # fmt: skip
    check.report.table(rows)


def check_versions(check: Check) -> None:
    differing = [key for key in SAME if _differs(check.ranks, key)]
    for key in differing:
        text = f"{key} differs: {_by_host(check.ranks, key)}; install the same everywhere"
        check.report.add("versions", FAILS, text)
    for key in (key for key in LIKE if _differs(check.ranks, key)):
        check.report.add("versions", NOTE, f"{key} differs: {_by_host(check.ranks, key)}")
    if not differing:
        check.report.add("versions", OK, "PyTorch, NCCL and this project are the same everywhere")


def check_clocks(check: Check) -> None:
    with check.part("comparing the clocks", NETWORK):
        offsets = clock_offsets(check.run.exchange)
    check.report.facts["clock_offsets_seconds"] = offsets
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    worst = abs(offsets[rank])
    text = f"within {worst * 1000:.0f} ms of that of rank 0"
    if worst > CLOCKS:
        text = f"{check.host(rank)} differs by {worst:.1f} s from rank 0: start NTP there"
    check.report.add("clocks", FAILS if worst > CLOCKS else OK, text)


def check_collectives(check: Check) -> None:
    rows, timings = [("collective", "latency", "bandwidth", "size")], []
    for name in COLLECTIVES:
        with check.part(f"{name} over all ranks", NETWORK):
            timing = measure(check.run.exchange, check.run.device, name)  # type: ignore[arg-type]  # of processes
        timings.append(dataclasses.asdict(timing))
        latency, bandwidth = amount(timing.latency, "s"), amount(timing.bandwidth, "B/s")
        rows.append((name, latency, bandwidth, amount(timing.size, "B")))
    check.report.facts["collectives"] = timings
    check.report.table(rows)


def check_speeds(check: Check) -> None:
    with check.part("matrix products on all ranks", "a GPU or a core hangs"):
        speeds = check.run.exchange.gather_json(matrix_speed(check.run.device))
    check.report.facts["operations_per_second"] = speeds
    rank, part = slowest(speeds)
    text = f"rank {rank} on {check.host(rank)}, {part:.0%} of the median"
    text += f" ({amount(speeds[rank], 'FLOP/s')} in matrix products)"
    if part >= SLOW:
        check.report.add("slowest rank", OK, text)
    elif check.run.device.type == "cuda":
        advice = "look at its clocks, temperature and other processes (nvidia-smi -q)"
        check.report.add("slowest rank", FAILS, f"{text}: {advice}")
    else:
        check.report.add("slowest rank", NOTE, f"{text}: its cores may be shared")


def check_equality(check: Check) -> None:
    with check.part("training a small network", NETWORK):
        difference, others = difference_from_one(check.run.exchange, check.run.device)
    check.report.facts["difference_from_one_process"] = difference
    size = check.run.exchange.size
    text = f"{size} processes train a small network as one does, to {difference:.1e} (float64)"
    holds = difference <= ALLOWED_IN_FLOAT64  # not so if it is NaN
    if not holds:
        text = f"{size} processes do not train as one does: parameters differ by {difference:g}"
    check.report.add("equal to one process", OK if holds else FAILS, text)
    if others:
        ranks = ", ".join(map(str, others))
        text = f"ranks {ranks} have other parameters than rank 0 after the same steps"
        check.report.add("equal on all ranks", FAILS, text)


def check_folder(check: Check) -> None:
    if check.run.settings.output is None:
        if len(check.hosts) > 1:
            text = "--output FOLDER names the folder of the run, which all hosts must share"
            check.report.add("shared folder", SKIPPED, text)
        return
    folder = Path(check.run.settings.output)
    with check.part(f"writing to {folder}", "its file system hangs"):
        problem = folder_problem(check.run.exchange, folder, check.own["host"])
    text = f"this host can write to {folder}"
    if len(check.hosts) > 1:
        text = f"all {len(check.hosts)} hosts write to {folder}, and see each other's files"
    name = "shared folder" if len(check.hosts) > 1 else "folder"
    check.report.add(name, FAILS if problem else OK, f"{folder}: {problem}" if problem else text)


def _differs(ranks: list[dict], key: str) -> bool:
    return len({rank[key] for rank in ranks}) > 1


def _values(ranks: list[dict], key: str) -> str:
    return " / ".join(dict.fromkeys(rank[key] or "-" for rank in ranks))


def _by_host(ranks: list[dict], key: str) -> str:
    """The first host with each value."""
    first: dict = {}
    for rank in ranks:
        first.setdefault(rank[key], rank["host"])
    return ", ".join(f"{value} on {host}" for value, host in first.items())


# ---- what hosts must have in common: the time, and the folder of the run ----------------------


def clock_offsets(exchange: Exchange, clock=time.time) -> list[float]:
    """Seconds by which each rank's clock is ahead of that of rank 0, to within the time of a
    barrier. Collective."""
    stamps = []
    for _ in range(ROUNDS):
        exchange.barrier()
        stamps.append(clock())
    told = exchange.gather_json(stamps)
    return [
        statistics.median(a - b for a, b in zip(own, told[0], strict=True)) for own in told
    ]  # fmt: skip


def folder_problem(
    exchange: Exchange, folder: Path, host: str, patience: float = PATIENCE
) -> str | None:
    """Whether every host can write to `folder`, and sees what the others write. Collective; leaves
    no file behind, nor the folder if it was not there.

    Returns:
        what is wrong, or None; the same on all ranks.
    """
    name = exchange.gather_json(uuid.uuid4().hex[:8])[0]
    # Path.exists would raise what writing finds out, too, as that there is no permission.
    made = not os.path.exists(folder)
    exchange.barrier()
    own, problem = folder / f".check-{name}-{exchange.rank}", None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(name, encoding="ascii")
    except OSError as error:
        problem = f"{host} cannot write to it: {reason(error)}"
    problems = exchange.gather_json(problem)
    if not any(problems):
        others = [folder / f".check-{name}-{rank}" for rank in range(exchange.size)]
        absent = _wait_for(others, patience)
        problem = f"{host} does not see what other hosts write there" if absent else None
        problems = exchange.gather_json(problem)
    with contextlib.suppress(OSError):
        own.unlink()
    exchange.barrier()
    if made and exchange.rank == 0:
        with contextlib.suppress(OSError):  # it is not empty: others use it
            folder.rmdir()
    return next(filter(None, problems), None)


def _wait_for(paths: list[Path], patience: float) -> list[Path]:
    """Those that have not appeared in time."""
    end = time.monotonic() + patience
    while absent := [path for path in paths if not os.path.exists(path)]:
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    return absent
