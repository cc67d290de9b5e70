#!/usr/bin/env python3
"""Seconds until `--help` has answered, and until a run has done its first training step.

    python benchmarks/startup.py
    python benchmarks/startup.py --dataset imagefolder --data_dir my_pictures --image_size 32

Unknown flags are passed to the run; without any it trains on the built-in pictures. The first run
decodes them and is not counted.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import median_and_range, parser, spread, write_json

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
    options, flags = parser(__doc__, repetitions=5, threads=None).parse_known_args()
    flags = flags or ["--dataset", "shapes"]
    flags += ["--depth", "18", "--width", "16"]
    seconds_to_first_step(flags)
    figures = {
        "--help": [seconds_to_help() for _ in range(options.repetitions)],
        "first step": [seconds_to_first_step(flags) for _ in range(options.repetitions)],
    }
    for name, values in figures.items():
        print(f"{name:12} {spread(median_and_range(values))} s")
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
