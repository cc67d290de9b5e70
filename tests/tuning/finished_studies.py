"""The results of a study, read from its folder, and what its runs have done so far."""

import csv
from collections import Counter
from pathlib import Path

from patience import wait_until

SHORT = ["--trials", "7", "--confirm", "1"]


def rows(folder: Path) -> list[dict]:
    with open(folder / "trials.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results(folder: Path) -> dict[str, tuple]:
    """The results of a study, without its times."""
    return {
        row["trial"]: tuple(v for k, v in row.items() if k != "seconds") for row in rows(folder)
    }


def ends(tmp_path) -> Counter:
    lines = (tmp_path / "trace").read_text().splitlines()
    return Counter(line for line in lines if line.startswith("end"))


def wait_for_trace(tmp_path, text: str) -> None:
    trace = tmp_path / "trace"
    wait_until(lambda: trace.exists() and text in trace.read_text())
