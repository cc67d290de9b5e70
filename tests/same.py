#!/usr/bin/env python3
"""Shows that a change leaves everything as it was: the same short runs, at a revision and now.

    make same REV=HEAD~3                 all cases of tests/short_runs.py
    make same REV=main ONLY="ngd resume" these alone

Each run's exit codes, messages, metrics, weights, optimizer state, checkpoints and reports are
compared to the bit, without times, speeds and memory. A difference that is meant stands in
tests/same_differences.txt with its reason. What a revision gave is kept in .cache/same.
"""

import argparse
import concurrent.futures
import csv
import difflib
import fnmatch
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from short_runs import CASES, REFUSED, call, write_data

HERE = Path(__file__).parent
ROOT = HERE.parent
# Keys of JSON whose values are measured, not computed.
MEASURED = re.compile(
    r"seconds.*|samples_per_second|time_share|peak_memory_bytes|metrics_bytes|mfu|gpu_.*"
)
SUMS = ("epoch_sums", "window_sums", "window")
# In messages: times, speeds, sizes, names by checksum, and advice that depends on times.
MASKS = [
    (r"(?m)^.* took \d+% of the time.*\n", ""),
    (r"\d{4}-\d\d-\d\d[ T_-]\d\d[:-]?\d\d[:-]?\d\d", "TIME"),
    (r"\b\d+(:\d\d)+\b", "TIME"),
    (r"[\d.,]+ ?(ms|s|seconds?|minutes?|hours?|min|h)\b", "TIME"),
    (r"[\d.,]+ (samples|pictures|texts|tokens)(/s| (a|per) second)", "SPEED"),
    (r"[\d.,]+ [KMGT]i?B\b", "SIZE"),
    (r"cache/[0-9a-f]{64}", "cache/KEY"),
]
LEFT_OUT = ("*/.lock", "*.png", "*/tensorboard/*", "*/SHA256SUMS", "cache/*", "*/journal.jsonl")
HASHED = (".safetensors", ".onnx")


def text_of(path: Path) -> str:
    """The part of a file that is compared: JSON without measured values, tensors as a checksum."""
    data = path.read_bytes()
    if path.suffix in HASHED:
        return hashlib.sha256(data).hexdigest()
    text = data.decode("utf-8", errors="replace")
    try:
        if path.suffix == ".json":
            return json.dumps(plain(json.loads(text)), indent=1)
        if path.suffix == ".jsonl":
            return "\n".join(json.dumps(plain(json.loads(line))) for line in text.splitlines())
        if path.name == "trials.csv":
            return "\n".join(json.dumps(plain(row)) for row in csv.DictReader(io.StringIO(text)))
    except json.JSONDecodeError:
        pass
    return masked(text)


def plain(value):
    """A JSON value without what is measured. A long text, such as a random state, is not masked."""
    if isinstance(value, dict):
        # Since 435da05 sums go by name; before, they were in the same order.
        sums = {k: [*v.values()] for k, v in value.items() if k in SUMS and isinstance(v, dict)}
        return {k: plain(v) for k, v in (value | sums).items() if not MEASURED.fullmatch(k)}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return masked(value) if isinstance(value, str) and len(value) < 500 else value


def masked(text: str) -> str:
    for pattern, replacement in MASKS:
        text = re.sub(pattern, replacement, text)
    return text


def run_case(tree: Path, scratch: Path, name: str) -> dict[str, str]:
    """The results of a case with the code in `tree`: {name of a file or message: text}."""
    folder = scratch / f"case-{name}"  # beside the folders of the data
    folder.mkdir()
    result = {}
    for number, command in enumerate(CASES[name], 1):
        done = call(tree, command, folder, capture_output=True, text=True, timeout=600)
        result[f"{number} exit code"] = str(done.returncode)
        for kind, text in (("stdout", done.stdout), ("stderr", done.stderr)):
            result[f"{number} {kind}"] = masked(text.replace(str(tree), "TREE"))
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder).as_posix()
        if path.is_file() and not any(fnmatch.fnmatch(place, glob) for glob in LEFT_OUT):
            result[masked(place)] = text_of(path).replace(str(tree), "TREE")
    return result


def results_of(tree: Path, names: list[str], kept: Path | None) -> dict[str, dict[str, str]]:
    """{case: its results}. A case that is in the file `kept` already is not run again."""
    results = json.loads(kept.read_text()) if kept and kept.exists() else {}
    missing = [name for name in names if name not in results]
    with tempfile.TemporaryDirectory(prefix="same-") as scratch:
        write_data(Path(scratch))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            futures = {pool.submit(run_case, tree, Path(scratch), name): name for name in missing}
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                results[futures[future]] = future.result()
                print(f"  {done} of {len(missing)}: {futures[future]}", file=sys.stderr, flush=True)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(results))
    return {name: results[name] for name in names}


def unpack(revision: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def declared() -> list[tuple[str, str, str]]:
    """(case, file, reason) of each line of the file; the first two may have wildcards."""
    lines = (HERE / "same_differences.txt").read_text().splitlines()
    rows = [line.split("|", 2) for line in lines if line.strip() and not line.startswith("#")]
    return [tuple(part.strip() for part in row) for row in rows]


def compare(before: dict, now: dict, allowed: list) -> tuple[list[str], list[str]]:
    """(differences, each with its first lines; differences that are declared)."""
    differences, meant = [], []
    pairs = {(case, file) for case in now for file in before[case] | now[case]}
    for name, file in sorted(pairs):
        old, new = before[name].get(file, "(missing)"), now[name].get(file, "(missing)")
        if old == new:
            continue
        reasons = [
            reason for case, glob, reason in allowed
            if fnmatch.fnmatch(name, case) and fnmatch.fnmatch(file, glob)
        ]  # fmt: skip
        if reasons:
            meant.append(f"{name}: {file}: differs as declared: {reasons[0]}")
            continue
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "before", "now", lineterm="", n=0
        )
        shown = [f"    {line[:300]}" for line in list(lines)[:20]]
        differences.append("\n".join([f"{name}: {file}: DIFFERENT", *shown]))
    return differences, meant


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("revision", help="of git, with which the working tree is compared")
    words.add_argument("cases", nargs="*", help="these alone; default: all")
    given = words.parse_args()
    names = given.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        words.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", given.revision + "^{commit}"], cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode:
        words.error(f"git knows no revision {given.revision}")
    commit = found.stdout.strip()
    import torch

    here = [torch.__version__, platform.processor(), torch.backends.cpu.get_cpu_capability()]
    here += [path.read_text() for path in (HERE / "short_runs.py", HERE / "same.py")]
    key = hashlib.sha256(repr(here).encode()).hexdigest()[:12]
    kept = ROOT / ".cache" / "same" / f"{commit[:12]}-{key}.json"
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        tree = Path(folder) / "tree"
        unpack(commit, tree)
        print(f"{given.revision} ({commit[:12]}):", file=sys.stderr)
        before = results_of(tree, names, kept)
        shutil.rmtree(tree)
    print("the working tree:", file=sys.stderr)
    now = results_of(ROOT, names, None)
    differences, meant = compare(before, now, declared())
    print("\n".join([*meant, *differences]))
    for name in set(names) - {*REFUSED}:
        codes = [text for key, text in now[name].items() if key.endswith("exit code")]
        if {*codes} != {"0"}:
            print(f"note: {name} ends with {', '.join(codes)}: it shows less than it should")
    files = sum(map(len, now.values()))
    print(f"{len(names)} cases, {files} files and messages: {len(differences)} differences, "
          f"{len(meant)} declared ones")  # fmt: skip
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
