"""results.jsonl: every finished run and every timing, a line each, from which a study goes on."""

import dataclasses
import json
from pathlib import Path

from benchmarks.studies import writing
from benchmarks.study.plan import Result, Results, Run
from utils.errors import UserError


class Store:
    """Keeps what is finished; a stopped process loses at most the line it was writing.

    A line is {"kind": "run" or "timing", "of": what was done, "setting": on what, "result": ...}.

    Raises:
        UserError: the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text() if path.exists() else ""
            if text and not text.endswith("\n"):  # a kill cut the last line off
                text = text[: text.rfind("\n") + 1]
                path.write_text(text)
        self._records = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                record = json.loads(line)
                keys = ("kind", "of", "setting", "result")
                self._records.append({key: record[key] for key in keys})
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}: line {number} is no record of a study: remove it, or give another "
                    "--output"
                ) from None

    def results(self, setting_of) -> Results:
        """The runs whose setting is `setting_of(run)`."""
        results = {}
        for record in self._records:
            if record["kind"] == "run":
                of = dict(record["of"])
                of["settings"] = tuple((name, value) for name, value in of["settings"])
                run = Run(**of)
                if record["setting"] == setting_of(run):
                    results[run] = Result(**record["result"])
        return results

    def timing(self, of: dict, setting: dict) -> dict | None:
        """What `add_timing` was given for the same; None where it was not."""
        of = json.loads(json.dumps(of))  # tuples become lists, as they do in the file
        for record in reversed(self._records):
            if (record["kind"], record["of"], record["setting"]) == ("timing", of, setting):
                return record["result"]
        return None

    def add_run(self, run: Run, setting: dict, result: Result) -> None:
        self._add("run", dataclasses.asdict(run), setting, dataclasses.asdict(result))

    def add_timing(self, of: dict, setting: dict, speeds: dict[str, list[float]]) -> None:
        self._add("timing", of, setting, speeds)

    def _add(self, kind: str, of: dict, setting: dict, result: dict) -> None:
        record = {"kind": kind, "of": of, "setting": setting, "result": result}
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
