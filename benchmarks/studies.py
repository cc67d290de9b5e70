"""What the studies share: long runs from one command line, which continues when repeated."""

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from utils.errors import UserError
from utils.files import reason, replace_file
from utils.measures.compute import paired as paired  # for the studies


def parser(name: str, description: str, jobs: bool = True) -> argparse.ArgumentParser:
    """The flags of every study.

    Args:
        jobs: whether it can train several runs at once.
    """
    flags = argparse.ArgumentParser(
        name, description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    add = flags.add_argument
    add("--output", type=Path, required=True, help="folder of the results")
    add("--data_dir", type=Path, help="train/<class>/, test/<class>/ (default: synthetic shapes)")
    add("--cache_dir", type=Path, default=Path(".cache"), help="decoded pictures")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    if jobs:
        add("--jobs", type=int, default=1, help="processes that train at once (default: 1)")
    add("--threads", type=int, default=1, help="CPU threads of each (default: 1)")
    return flags


def require_one(options: argparse.Namespace, *names: str) -> None:
    """Raises UserError if one of these flags, or of those of every study, is below 1."""
    for name in ("jobs", "threads", *names):
        if getattr(options, name, 1) < 1:
            raise UserError(f"--{name} must be 1 or more")


def data_flags(options: argparse.Namespace) -> list[str]:
    """The data flags for resnet50_test.py and its search."""
    if options.data_dir is None:
        return ["--dataset", "shapes"]
    return [
        "--dataset", "imagefolder", "--data_dir", str(options.data_dir.resolve()),
        "--cache_dir", str(options.cache_dir.resolve()),
    ]  # fmt: skip


def run_name(label: str, flags: list[str]) -> str:
    """The name of a run's folder: other flags, another folder."""
    return f"{label}-{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"


def read_records(path: Path) -> list[dict]:
    """The lines of results.jsonl; without the file none. A line that a kill has cut off is left
    out. Raises OSError."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def last_line(text: str) -> str:
    """The last line of what a failed process wrote to stderr, which tells the reason."""
    return (text.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")


def markdown(head: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are aligned left, the others right."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError within into a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output: {folder}: {reason(error)}") from None


def write_results(
    folder: Path, summary: dict, table: str, plots: dict[str, Callable[[dict, Path], None]]
) -> None:
    """Writes summary.json, table.md and the plots, by their file names; prints the table."""
    with writing(folder):
        replace_file(folder / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
        replace_file(folder / "table.md", table.encode())
        for name, draw in plots.items():
            draw(summary, folder / name)
    print(f"\n{table}\nwritten to {folder}")


def exit_code(study: Callable[[], None], goes_on: str) -> int:
    """Runs a study; returns 2 after one line for a user's mistake, 130 after Ctrl-C.

    Args:
        goes_on: from where the same command continues, in words.
    """
    try:
        study()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {goes_on}", file=sys.stderr)
        return 130
    return 0
