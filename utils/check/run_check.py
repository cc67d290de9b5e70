"""`--check`: what is there, whether it works, and how fast it is."""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from utils.check.equality import ALLOWED, difference_from_one
from utils.check.kernels import ALLOWED as ALLOWED_FUSED
from utils.check.kernels import how_computed, largest_differences
from utils.check.links import ENOUGH, Expected, expected, transports
from utils.check.machine import facts_of
from utils.check.packages import NEEDED, OF_GPUS, OPTIONAL, installed, missing_text
from utils.check.patience import Patience
from utils.check.report import FAILS, NOTE, OK, SKIPPED, Report, amount
from utils.check.shared import clock_offsets, folder_problem
from utils.check.speed import matrix_speed, slowest
from utils.launch.environment import note_exit_code
from utils.launch.signals import Signals
from utils.runs.run import Run

SECONDS = 90  # that a part of the check may take
CLOCKS = 2.0  # seconds by which the clocks of hosts may differ: see docs/distributed.md
SLOW = 0.7  # a GPU below this part of the median speed fails the check
FREE = 0.8  # a GPU with less free memory than this part is in use by others
SAME = ("torch", "cuda", "nccl", "code")  # what must be the same on all ranks
LIKE = ("python", "driver")  # what had better be
NETWORK = (
    "the processes do not reach each other: set the interface by GLOO_SOCKET_IFNAME, on GPUs by "
    "NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what NCCL uses; see docs/distributed.md, 'When it "
    "hangs'"
)


def run_check(settings, origin: dict, signals: Signals) -> int:
    """Checks this process, or all that were launched together. Returns the exit code: 1 if
    something does not hold."""
    patience = Patience()
    with _nccl_log() as log:
        with patience.part("joining the other processes", SECONDS, NETWORK):
            run = Run(settings, origin, signals, "check", "none")
        with run:
            report = Report(run.console.say)
            path = Path("runs") / time.strftime("check-%Y%m%d-%H%M%S.json")
            check = Check(run, report, patience, path)
            check.who()
            check.this_device()
            if run.exchange.size > 1:
                check.all_ranks(log)
            check.output_folder()
            code = 1 if any(run.exchange.gather_json(bool(report.failed))) else 0
            if run.leads:
                _conclude(report, path)
    if code:
        note_exit_code(code)
    return code


def _conclude(report: Report, path: Path) -> None:
    failed = list(dict.fromkeys(report.failed))
    report.say("")
    report.say(f"these do not hold: {', '.join(failed)}" if failed else "everything holds")
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


class Check:
    """The parts of the check, in their order. All methods but `who` are collective.

    Args:
        run: its processes, device and console.
        report: of this rank; that of the first is shown.
        patience: ends the process if a part does not end.
        path: of the JSON file.
    """

    def __init__(self, run: Run, report: Report, patience: Patience, path: Path):
        self.run, self.report, self.patience, self.path = run, report, patience, path
        together = run.exchange.size > 1
        rank = run.exchange.rank
        self.own = facts_of(run.device, rank, run.threads, together)
        self.ranks = run.exchange.gather_json(self.own)
        report.facts["ranks"] = self.ranks
        self.hosts = list(dict.fromkeys(rank["host"] for rank in self.ranks))

    def who(self) -> None:
        """A row for each host."""
        headings = ("host", "ranks", "devices", "driver", "PyTorch", "CUDA", "NCCL", "network")
        rows: list[tuple[str, ...]] = [headings]
        for host in self.hosts:
            members = [rank for rank in self.ranks if rank["host"] == host]
            numbers = [rank["rank"] for rank in members]
            devices = Counter(rank["device"]["name"] for rank in members)
            network = members[0].get("network")
            rows.append((
                host,
                f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
                ", ".join(f"{count} x {name}" for name, count in devices.items()),
                *(_values(members, key) for key in ("driver", "torch", "cuda", "nccl")),
                _network(network) if network else "-",
            ))  # fmt: skip
        self.report.table(rows)

    # ---- this device ------------------------------------------------------------------------

    def this_device(self) -> None:
        """Memory, arithmetic, fused modules and packages of this process."""
        report, device = self.report, self.run.device
        self._memory()
        with self._part("the fused modules", "Triton compiles its kernels; see the lines above"):
            differences = largest_differences(device)
        worst = max(differences.values())
        report.facts["fused"] = differences
        text = f"as the plain ones to {worst:.1e}, {how_computed(device)}"
        report.add("fused modules", OK if worst <= ALLOWED_FUSED else FAILS, text)
        missing = missing_text(NEEDED)
        text = "all of requirements.txt are installed"
        report.add("packages", FAILS if missing else OK, missing or text)
        optional = OPTIONAL + (OF_GPUS if device.type == "cuda" else ())
        report.facts["packages"] = installed(NEEDED + optional)
        if missing := missing_text(optional):
            report.add("optional packages", NOTE, missing)
        else:
            report.add("optional packages", OK, "all are installed")
        self._of_other_ranks()

    def _of_other_ranks(self) -> None:
        """Adds what other ranks have found wrong with themselves to the report of the first."""
        told = self.run.exchange.gather_json(self.report.findings)
        said = {(found["name"], found["text"]) for found in told[0]}
        for rank, findings in enumerate(told[1:], 1):
            for found in findings:
                name, verdict, text = found["name"], found["verdict"], found["text"]
                if self.run.leads and verdict in (NOTE, FAILS) and (name, text) not in said:
                    said.add((name, text))
                    self.report.add(name, verdict, f"rank {rank} on {self._host(rank)}: {text}")

    def _host(self, rank: int) -> str:
        return self.ranks[rank]["host"]

    def _memory(self) -> None:
        device, report = self.own["device"], self.report
        if device["type"] != "cuda":
            available = amount(self.own["memory_available_bytes"], "B")
            text = f"{available} available; cores: {self.own['cores']}, threads: {self.run.threads}"
            report.add("memory", OK, text)
            return
        free, total = device["memory_free_bytes"], device["memory_bytes"]
        text = f"{amount(free, 'B')} of {amount(total, 'B')} free"
        if free < FREE * total:
            report.add("memory", NOTE, f"{text}: other processes use this GPU (nvidia-smi)")
        else:
            report.add("memory", OK, text)

    # ---- all together -----------------------------------------------------------------------

    def all_ranks(self, log: Path | None) -> None:
        self._versions()
        self._clocks()
        self._collectives()
        self._transports(log)
        self._slowest()
        self._equality()

    def _versions(self) -> None:
        differing = [key for key in SAME if _differs(self.ranks, key)]
        for key in differing:
            text = f"{key} differs: {_by_host(self.ranks, key)}; install the same everywhere"
            self.report.add("versions", FAILS, text)
        for key in (key for key in LIKE if _differs(self.ranks, key)):
            self.report.add("versions", NOTE, f"{key} differs: {_by_host(self.ranks, key)}")
        if not differing:
            self.report.add(
                "versions", OK, "PyTorch, NCCL and this project are the same everywhere"
            )

    def _clocks(self) -> None:
        with self._part("comparing the clocks", NETWORK):
            offsets = clock_offsets(self.run.exchange)
        self.report.facts["clock_offsets_seconds"] = offsets
        rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
        worst = abs(offsets[rank])
        text = f"within {worst * 1000:.0f} ms of that of rank 0"
        if worst > CLOCKS:
            text = f"{self._host(rank)} differs by {worst:.1f} s from rank 0: start NTP there"
        self.report.add("clocks", FAILS if worst > CLOCKS else OK, text)

    def _collectives(self) -> None:
        from utils.distributed.collectives import COLLECTIVES, measure

        link = expected(self.ranks)
        self.report.facts["expected"] = dataclasses.asdict(link)
        rows = [("collective", "latency", "bandwidth", "of the link", "size")]
        timings = []
        for name in COLLECTIVES:
            with self._part(f"{name} over all ranks", NETWORK):
                timings.append(measure(self.run.exchange, self.run.device, name))
        for timing in timings:
            reached = "-"
            if link.bandwidth is not None:
                reached = f"{timing.bandwidth / link.bandwidth:.0%}"
            latency, bandwidth = amount(timing.latency, "s"), amount(timing.bandwidth, "B/s")
            rows.append((timing.name, latency, bandwidth, reached, amount(timing.size, "B")))
        self.report.facts["collectives"] = [dataclasses.asdict(timing) for timing in timings]
        self.report.table(rows)
        for verdict, text in judge(timings, link):
            self.report.add("collectives", verdict, text)

    def _transports(self, log: Path | None) -> None:
        """What NCCL says that it uses, by its log."""
        text = ""
        with contextlib.suppress(OSError):  # without GPUs, or with a log of the user's own
            text = log.read_text(errors="replace") if log else ""
        told = self.run.exchange.gather_json(transports(text))
        devices = list(dict.fromkeys(name for names, _ in told for name in names))
        ways = sum((Counter(ways) for _, ways in told), Counter())
        self.report.facts["nccl"] = {"devices": devices, "channels": ways}
        if devices or ways:
            used = ", ".join(f"{way} ({count} channels)" for way, count in ways.most_common())
            self.report.add("NCCL", OK, f"uses {'; '.join(devices) or 'no network'}; {used}")
        if any("Socket" in way for way in ways) and self.own["network"]["infiniband"]:
            text = "uses Ethernet, though there is InfiniBand: are its libraries in the container?"
            self.report.add("NCCL", NOTE, text)

    def _slowest(self) -> None:
        with self._part("matrix products on all ranks", "a GPU or a core hangs"):
            speeds = self.run.exchange.gather_json(matrix_speed(self.run.device))
        self.report.facts["operations_per_second"] = speeds
        rank, part = slowest(speeds)
        text = f"rank {rank} on {self._host(rank)}, {part:.0%} of the median"
        text += f" ({amount(speeds[rank], 'FLOP/s')} in matrix products)"
        if part >= SLOW:
            self.report.add("slowest rank", OK, text)
        elif self.run.device.type == "cuda":
            advice = "look at its clocks, temperature and other processes (nvidia-smi -q)"
            self.report.add("slowest rank", FAILS, f"{text}: {advice}")
        else:
            self.report.add("slowest rank", NOTE, f"{text}: its cores may be shared")

    def _equality(self) -> None:
        with self._part("training a small network", NETWORK):
            difference, others = difference_from_one(self.run.exchange, self.run.device)
        self.report.facts["difference_from_one_process"] = difference
        size = self.run.exchange.size
        text = f"{size} processes train a small network as one does, to {difference:.1e} (float64)"
        holds = difference <= ALLOWED  # not so if it is NaN
        if not holds:
            text = f"{size} processes do not train as one does: parameters differ by {difference:g}"
        self.report.add("equal to one process", OK if holds else FAILS, text)
        if others:
            ranks = ", ".join(map(str, others))
            text = f"ranks {ranks} have other parameters than rank 0 after the same steps"
            self.report.add("equal on all ranks", FAILS, text)

    def output_folder(self) -> None:
        if self.run.settings.output is None:
            if len(self.hosts) > 1:
                text = "--output FOLDER names the folder of the run, which all hosts must share"
                self.report.add("shared folder", SKIPPED, text)
            return
        folder = Path(self.run.settings.output)
        with self._part(f"writing to {folder}", "its file system hangs"):
            problem = folder_problem(self.run.exchange, folder, self.own["host"])
        text = f"this host can write to {folder}"
        if len(self.hosts) > 1:
            text = f"all {len(self.hosts)} hosts write to {folder}, and see each other's files"
        name = "shared folder" if len(self.hosts) > 1 else "folder"
        self.report.add(name, FAILS if problem else OK, f"{folder}: {problem}" if problem else text)

    def _part(self, name: str, advice: str):
        return self.patience.part(name, SECONDS, advice, self._write_unfinished)

    def _write_unfinished(self, line: str) -> None:
        if self.run.leads:
            self.report.add("unfinished", FAILS, line)
            self.report.write(self.path)


def judge(timings: list, link: Expected) -> list[tuple[str, str]]:
    """(verdict, text) of each thing to be said of the collectives.

    Args:
        timings: of utils/distributed/collectives.py.
    """
    if link.bandwidth is None:
        return [(SKIPPED, link.why)]
    given = amount(link.bandwidth, "B/s")
    found = []
    for timing in timings:
        if timing.bandwidth < ENOUGH * link.bandwidth:
            reached = amount(timing.bandwidth, "B/s")
            found.append((
                FAILS,
                f"{timing.name} reaches {reached} where the link gives {given} ({link.why}), less "
                f"than {ENOUGH:.0%}",
            ))  # fmt: skip
        if timing.latency > link.latency:
            most = amount(link.latency, "s")
            latency = amount(timing.latency, "s")
            text = f"{timing.name} of a small tensor takes {latency}; at most {most} is assumed"
            found.append((NOTE, text))
    if not any(verdict == FAILS for verdict, _ in found):
        found.append((OK, f"all reach {ENOUGH:.0%} of {given} or more ({link.why})"))
    return found


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


def _network(network: dict) -> str:
    speed = network["bytes_per_second"]
    text = network["interface"] + (f" ({amount(speed, 'B/s')})" if speed else "")
    ports = network["infiniband"]
    return text + (f", {len(ports)} x InfiniBand" if ports else "")
