"""The report of a check: lines for people, and a JSON file."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from utils.files import reason, replace_file
from utils.reporting.metrics import to_json

OK, NOTE, FAILS, SKIPPED = "ok", "note", "fails", "not checked"


class Report:
    """Collects what is found. Only `fails` makes the check fail.

    Args:
        say: called with each line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.facts: dict = {"time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self.findings: list[dict[str, str]] = []

    def add(self, name: str, verdict: str, text: str) -> None:
        """Adds a finding, and says it.

        Args:
            name: what was checked.
            verdict: OK, NOTE, FAILS or SKIPPED.
            text: what was found, and what to do where that is needed.
        """
        self.findings.append({"name": name, "verdict": verdict, "text": text})
        self.say(f"{verdict.upper() if verdict == FAILS else verdict:<11} {name}: {text}")

    def table(self, rows: Sequence[tuple[str, ...]]) -> None:
        """Says the rows, the first of which has the headings, with aligned columns."""
        self.say("")
        for line in aligned(rows):
            self.say(line)
        self.say("")

    @property
    def failed(self) -> list[str]:
        """Names of the checks that have failed."""
        return [found["name"] for found in self.findings if found["verdict"] == FAILS]

    def write(self, path: Path) -> None:
        """Writes facts and findings; says where, or why not."""
        result = "fails" if self.failed else "ok"
        content = {"result": result, "findings": self.findings} | self.facts
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (to_json(content, indent=2) + "\n").encode())
        except OSError as error:
            self.say(f"note: {path}: {reason(error)}; there is no JSON file of this check")
            return
        self.say(f"all figures, for whoever helps you: {path}")


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip()
            for r in rows]  # fmt: skip


def amount(value: float, unit: str) -> str:
    """1.5e9, "B/s" -> "1.5 GB/s"; 2e-5, "s" -> "20 us"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-6:.3g} u{unit}"
