#!/usr/bin/env python3
"""Training on a CPU beside a busy program: with all threads, and with as many as are left free.

    python benchmarks/busy_machine.py
    python benchmarks/busy_machine.py --quiet --repetitions 7

Whole runs of resnet50_test.py (ResNet-18 of width 16, built-in pictures, bf16), in turn, with and
without --threads, on the machine as it is and beside a process that never stops computing. Nothing
else should be running.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side

ENTRY = Path(__file__).parents[1] / "resnet50_test.py"
RUN = [
    "--dataset", "shapes", "--depth", "18", "--width", "16", "--bs", "128", "--device", "cpu",
    "--precision", "bf16", "--eval_every", "0",
]  # fmt: skip


@contextlib.contextmanager
def busy_program() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def speed(flags: list[str], busy: bool) -> float:
    """Samples per second of one run, without its first step."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    beside = busy_program() if busy else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, beside:
        output = Path(folder) / "run"
        subprocess.run(
            [sys.executable, ENTRY, *RUN, *flags, "--output", output],
            check=True, stdout=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        return json.loads((output / "summary.json").read_text())["samples_per_second"]


def main() -> None:
    flags = parser(__doc__, repetitions=3)
    flags.add_argument("--steps", type=int, default=150, help="of each run (default: 150)")
    flags.add_argument("--quiet", action="store_true", help="leave the busy program out")
    options = flags.parse_args()
    free = ["--max_steps", str(options.steps)]
    fixed = [*free, "--threads", str(options.threads)]
    runs = {
        "quiet, --threads": partial(speed, fixed, False),
        "quiet": partial(speed, free, False),
    }
    if not options.quiet:
        runs |= {"busy, --threads": partial(speed, fixed, True), "busy": partial(speed, free, True)}
    figures = side_by_side(runs, options.repetitions)
    baseline, *others = runs
    found = ratios(figures, *((name, baseline) for name in others))
    results = {"bf16": {"samples_per_second": figures, "ratios": found}}
    report("Beside a program that is always busy", results, options.json)


if __name__ == "__main__":
    main()
