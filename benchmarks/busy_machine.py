#!/usr/bin/env python3
"""Training on a CPU beside a program that is always busy: with all threads, with those left free.

    python benchmarks/busy_machine.py
    python benchmarks/busy_machine.py --precision fp32 --repetitions 5

Whole runs of resnet50_test.py (ResNet-18 of width 16, built-in pictures), in turn, with --threads
and without, on the machine as it is and beside the program. Nothing else should be running.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratio, report, side_by_side

ROOT = Path(__file__).parents[1]
MODEL = ["--dataset", "shapes", "--depth", "18", "--width", "16", "--bs", "128", "--device", "cpu"]


@contextlib.contextmanager
def busy_program(wanted: bool):
    """Beside it, a process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def speed(threads: list[str], busy: bool, precision: str, steps: int) -> float:
    """Samples per second of one run, without its first step."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as folder, busy_program(busy):
        output = Path(folder) / "run"
        subprocess.run(
            [sys.executable, str(ROOT / "resnet50_test.py"), *MODEL, "--precision", precision,
             "--max_steps", str(steps), "--eval_every", "0", *threads, "--output", str(output)],
            check=True, stdout=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        return json.loads((output / "summary.json").read_text())["samples_per_second"]


def main() -> None:
    words = parser(__doc__.splitlines()[0])
    words.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    words.add_argument("--steps", type=int, default=150, help="of each run (default: 150)")
    words.add_argument("--quiet", action="store_true", help="without that program alone")
    words.set_defaults(repetitions=3)
    given = words.parse_args()
    fixed = ["--threads", str(given.threads)]
    cases = {
        "quiet, --threads": (fixed, False),
        "quiet": ([], False),
        "busy, --threads": (fixed, True),
        "busy": ([], True),
    }
    if given.quiet:
        cases = {name: how for name, how in cases.items() if not how[1]}
    figures = side_by_side(
        {
            name: lambda how=how: speed(*how, given.precision, given.steps)
            for name, how in cases.items()
        },
        given.repetitions,
    )
    pairs = [("quiet", "quiet, --threads"), ("busy, --threads", "quiet, --threads"),
             ("busy", "quiet, --threads")]  # fmt: skip
    ratios = {
        f"{one} / {other}": ratio(figures, one, other) for one, other in pairs if one in figures
    }
    results = {given.precision: {"samples_per_second": figures, "ratios": ratios}}
    report("Beside a program that is always busy", results, given.json)


if __name__ == "__main__":
    main()
