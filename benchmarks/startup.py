#!/usr/bin/env python3
"""Seconds until `--help` answers, and until the first training step of a run is done.

    python benchmarks/startup.py
    python benchmarks/startup.py --dataset imagefolder --data_dir my_pictures --image_size 32

Flags that it does not know go to the run; without any it trains on the built-in pictures. The
first run decodes and is not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENTRY = Path(__file__).parents[1] / "resnet50_test.py"


def seconds_to_help() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, ENTRY, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def seconds_to_first_step(flags: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        started = time.perf_counter()
        run = subprocess.Popen(
            [sys.executable, ENTRY, *flags, "--log_every", "1", "--output", metrics.parent],
            stdout=subprocess.DEVNULL,
        )
        while not (metrics.exists() and metrics.stat().st_size) and run.poll() is None:
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        run.terminate()
        run.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options, flags = parser.parse_known_args()
    flags = flags or ["--dataset", "shapes"]
    flags += ["--depth", "18", "--width", "16"]
    seconds_to_first_step(flags)
    figures = {
        "--help": [seconds_to_help() for _ in range(options.repetitions)],
        "first step": [seconds_to_first_step(flags) for _ in range(options.repetitions)],
    }
    for name, values in figures.items():
        print(
            f"{name:12} {statistics.median(values):6.2f} s "
            f"({min(values):.2f} to {max(values):.2f} over {len(values)} runs)"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
