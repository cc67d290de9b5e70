"""What the benchmarks share: flags, runs taken in turn, ratios, the machine, printed figures."""

import argparse
import contextlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

UNITS = {
    "samples_per_second": ("samples/s", 0),
    "steps_per_second": ("steps/s", 2),
    "gflop_per_second": ("GFLOP/s", 0),
}


def parser(
    description: str, repetitions: int = 7, threads: int | None = 2
) -> argparse.ArgumentParser:
    """The flags of every benchmark, with these defaults; `threads` None: there is no such flag."""
    flags = argparse.ArgumentParser(description=description.splitlines()[0])
    flags.add_argument(
        "--repetitions",
        type=int,
        default=repetitions,
        help=f"runs of each (default: {repetitions})",
    )
    if threads is not None:
        flags.add_argument(
            "--threads", type=int, default=threads, help=f"CPU threads (default: {threads})"
        )
    flags.add_argument("--json", type=Path, help="also write the figures to this file")
    return flags


def machine() -> dict:
    import torch
    import torchvision

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # no Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(": ")[1]
                break
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def in_words(state: dict) -> str:
    """The machine, on one line."""
    return ", ".join(f"{key} {value}" for key, value in state.items() if value)


def in_turn(names: Iterable[str], repetitions: int) -> Iterator[str]:
    """A B, B A, A B, ...: the machine's speed drifts; the ratio of two neighbours hardly does. The
    order alternates, so that neither always follows the other."""
    names = list(names)
    for repetition in range(repetitions):
        yield from names if repetition % 2 == 0 else reversed(names)


def side_by_side(
    runs: dict[str, Callable[[], float]], repetitions: int, warm_up: bool = True
) -> dict[str, list]:
    """Calls the runs in turn; {name: what they returned}.

    Args:
        warm_up: first call each once, uncounted: it allocates memory and starts workers.
    """
    for run in runs.values() if warm_up else ():
        run()
    figures = {name: [] for name in runs}
    for name in in_turn(runs, repetitions):
        figures[name].append(runs[name]())
    return figures


def median_and_range(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(figures: dict[str, list], name: str, baseline: str) -> dict[str, float]:
    """Of `name` to `baseline`, over the pairs that were neighbours in time."""
    pairs = zip(figures[name], figures[baseline], strict=True)
    return median_and_range(one / other for one, other in pairs)


def ratios(figures: dict[str, list], *pairs: tuple[str, str]) -> dict[str, dict[str, float]]:
    """{"name / baseline": ratio}."""
    return {f"{one} / {other}": ratio(figures, one, other) for one, other in pairs}


def spread(found: dict[str, float], digits: int = 2) -> str:
    """A median with its range, as text."""
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f} to {found['max']:.{digits}f})"


def report(title: str, results: dict, path: Path | None, **state) -> None:
    """Prints medians and ratios; writes everything as JSON if a path is given.

    Args:
        results: {case: {a key of UNITS: {name: values}, "ratios": ...}}.
        state: further facts about the machine.
    """
    conditions = machine() | state
    print(f"{title}\n  {in_words(conditions)}")
    for case, result in results.items():
        print(f"  {case}")
        key = next(key for key in UNITS if key in result)
        unit, digits = UNITS[key]
        for name, values in result[key].items():
            print(f"    {name:28} {statistics.median(values):12,.{digits}f} {unit}")
        for name, found in result["ratios"].items():
            print(f"    {name:36} {spread(found, 3)}")
    if path is not None:
        write_json(path, {"machine": conditions, "results": results})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discards what is printed within."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
