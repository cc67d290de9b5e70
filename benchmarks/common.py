"""What every benchmark states: the machine, the versions, ratios of runs taken in turn."""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

UNITS = {"samples_per_second": ("samples/s", 0), "steps_per_second": ("steps/s", 2)}


def parser(description: str) -> argparse.ArgumentParser:
    """What all benchmarks take."""
    words = argparse.ArgumentParser(description=description)
    words.add_argument("--repetitions", type=int, default=7, help="pairs of runs (default: 7)")
    words.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    words.add_argument("--json", type=Path, help="also write the figures to this file")
    return words


def arguments(description: str) -> argparse.Namespace:
    return parser(description).parse_args()


def machine() -> dict:
    import torch
    import torchvision

    cpu = platform.processor() or platform.machine()
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


def side_by_side(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list]:
    """Calls the runs in turn, A B B A A B ..., and keeps what each returns (a speed: see UNITS).

    The machine's speed drifts; the ratio of two neighbours hardly does. The order changes from
    pair to pair, so that neither always follows the other.
    """
    figures = {name: [] for name in runs}
    for run in runs.values():
        run()  # not counted: memory, caches, worker processes
    for repetition in range(repetitions):
        order = list(runs) if repetition % 2 == 0 else list(reversed(runs))
        for name in order:
            figures[name].append(runs[name]())
    return figures


def ratio(figures: dict[str, list], name: str, baseline: str) -> dict:
    pairs = [a / b for a, b in zip(figures[name], figures[baseline], strict=True)]
    return {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}


def report(title: str, results: dict, path: Path | None) -> None:
    """Prints medians and ratios; writes everything as JSON where that is asked for."""
    state = machine()
    print(title)
    print("  " + ", ".join(f"{key} {value}" for key, value in state.items() if value))
    for case, result in results.items():
        print(f"  {case}")
        unit = next(unit for unit in UNITS if unit in result)
        for name, values in result[unit].items():
            print(
                f"    {name:24} {statistics.median(values):12,.{UNITS[unit][1]}f} {UNITS[unit][0]}"
            )
        for name, value in result["ratios"].items():
            print(
                f"    {name:24} {value['median']:12.3f} times ({value['min']:.3f} to "
                f"{value['max']:.3f} over {len(values)} pairs)"
            )
    if path is not None:
        path.write_text(json.dumps({"machine": state, "results": results}, indent=1) + "\n")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What the runs say goes nowhere."""
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), nowhere, nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = shown
