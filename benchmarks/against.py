#!/usr/bin/env python3
"""Whether a change costs time: start-up, training loop and loader, against a revision of git.

    python benchmarks/against.py REVISION
    python benchmarks/against.py HEAD~3 --only startup loader

Each benchmark runs as a process in a copy of the revision and in the working tree, in turn,
`--repetitions` times. A ratio below 1 is a loss of speed; a range that includes 1 shows no change.
"""

import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_turn, in_words, machine, parser, ratio, spread, write_json

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "startup": ["startup.py", "--repetitions", "3"],
    "trainer": ["trainer.py", "--repetitions", "3"],
    "loader": ["loader.py", "--only", "memory", "--repetitions", "3"],
}


def unpack(revision: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def speeds(tree: Path, name: str) -> dict[str, float]:
    """{what: speed} of one process of the benchmark `name` with the code in `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command, *flags = COMMANDS[name]
        subprocess.run(
            [sys.executable, tree / "benchmarks" / command, *flags, "--json", path],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return dict(_figures(json.loads(path.read_text())))


def _figures(found: dict) -> Iterator[tuple[str, float]]:
    if "results" not in found:  # of startup.py: seconds
        for what, seconds in found.items():
            yield what, 1 / statistics.median(seconds)
        return
    for case, result in found["results"].items():
        for what, values in result["samples_per_second"].items():
            if what.startswith("ours"):
                yield f"{case}: {what}", statistics.median(values)


def main() -> None:
    flags = parser(__doc__, repetitions=4, threads=None)
    flags.add_argument("revision", help="of git")
    flags.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    options = flags.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    ratios, state = {}, machine()
    print(f"speed now against {options.revision}, {options.repetitions} pairs of processes")
    print(f"  {in_words(state)}")
    with tempfile.TemporaryDirectory() as folder:
        unpack(options.revision, Path(folder))
        trees = {"before": Path(folder), "now": ROOT}
        for name in options.only:
            found: dict[str, dict[str, list[float]]] = {}
            for side in in_turn(trees, options.repetitions):
                for what, speed in speeds(trees[side], name).items():
                    found.setdefault(what, {side: [] for side in trees})[side].append(speed)
            for what, sides in found.items():
                ratios[what] = ratio(sides, "now", "before")
                print(f"  {what:60} {spread(ratios[what], 3)}", flush=True)
            results |= found
    if options.json:
        write_json(options.json, {"machine": state, "speeds": results, "ratios": ratios})


if __name__ == "__main__":
    main()
