"""Mutation test: a random sample of small changes to the code, each of which a test should notice.

cosmic-ray changes one place in a clone of the last commit, below runs/mutants/, and runs the fast
tests that reach the changed line, the cheapest of them, until one fails. Before the first sample
of a commit the fast tests run once under coverage.py, to see which test reaches which line. The
same command goes on where it was stopped; the results are in table-*.md beside the session.
"""

import argparse
import ast
import functools
import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import coverage
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome

ROOT = Path(__file__).resolve().parents[2]
CODE = [
    *("utils/training", "utils/distributed", "utils/optim", "utils/augment", "utils/mixup"),
    *("utils/checkpoints", "utils/engines", "utils/machine"),
    *("utils/data/batch.py", "utils/data/loader.py", "utils/data/steps.py"),
    "utils/data/images/loader.py",
    "utils/pieces.py",
]
TESTS = [
    f"tests/{name}"
    for name in (
        *("augment", "checkpoints", "data", "distributed", "engines", "machine", "mixup", "optim"),
        "training",
    )
]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}


def git(*args: str, cwd=ROOT) -> str:
    return subprocess.run(
        ("git", *args), cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def prepare(folder: Path, tests: list[str]) -> None:
    """Makes the clone, and finds in it the lines that each test reaches."""
    tree = folder / "tree"
    if not tree.exists():
        git("clone", "-q", "--shared", str(ROOT), str(tree))
    git("checkout", "-q", "--", ".", cwd=tree)  # a run that was killed leaves its mutant behind
    if (folder / "coverage").exists():
        return
    print("running all fast tests once, to see which lines each of them reaches", flush=True)
    plugins = tree / "tests/mutants"
    environment = os.environ | {
        "COVERAGE_PROCESS_START": str(plugins / "coveragerc"),
        "COVERAGE_TREE": str(tree),
        "COVERAGE_DATA": str(folder / "part"),
        "TEST_SECONDS": str(folder / "seconds.json"),
        "PYTHONPATH": str(plugins),
    }
    command = [*PYTEST, "-p", "reached_lines", *tests]
    if subprocess.run(command, cwd=tree, env=environment, check=False).returncode > 1:
        sys.exit("error: the tests could not be run")
    whole = coverage.Coverage(data_file=folder / "part", config_file=False)
    whole.combine([str(folder)])
    whole.save()
    (folder / "part").rename(folder / "coverage")


def noise(node: ast.AST) -> ast.AST | None:
    """Code that no test need notice: messages, assertions, annotations."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
        return node
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return node
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return node.test
    return getattr(node, "annotation", None) or getattr(node, "returns", None)


def is_within(nodes: list[ast.AST], line: int, column: int) -> bool:
    return any(
        (n.lineno, n.col_offset) <= (line, column) < (n.end_lineno, n.end_col_offset) for n in nodes
    )


class Module:
    """Where a file may be mutated, and by which tests its lines are reached."""

    def __init__(self, path: Path, contexts: dict[int, list[str]]):
        self.tree = ast.parse(path.read_text())
        nodes = list(ast.walk(self.tree))
        self.noise = [part for node in nodes if (part := noise(node)) is not None]
        self.arithmetic = [n for n in nodes if isinstance(n, (ast.BinOp, ast.AugAssign))]
        definitions = (ast.FunctionDef, ast.ClassDef)
        self.definitions = [n for n in nodes if isinstance(n, definitions)]
        self.statements = [n for n in nodes if isinstance(n, ast.stmt)]
        self.contexts = contexts

    def is_noise(self, line: int, column: int) -> bool:
        return is_within(self.noise, line, column)

    def is_arithmetic(self, line: int, column: int) -> bool:
        """Whether a `*` here multiplies."""
        return is_within(self.arithmetic, line, column)

    @functools.cache  # noqa: B019
    def tests(self, line: int) -> frozenset[str]:
        """Tests, or whole files of tests, that reach the statement in this line; for a line that
        runs on import, those that reach anything of the function, the class or the module."""
        around = [n for n in self.definitions if n.lineno <= line <= n.end_lineno]
        around.sort(key=lambda n: n.lineno, reverse=True)
        if around and isinstance(around[0], ast.FunctionDef) and line >= around[0].body[0].lineno:
            return self._reaching(*self._statement(line))
        for node in around:
            if found := self._reaching(node.body[0].lineno, node.end_lineno):
                return found
        return self._reaching(1, max(self.contexts, default=0))

    def _statement(self, line: int) -> tuple[int, int]:
        """First and last line of the statement; of one with a body, those of its head."""
        for node in self.statements:
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno
            if node.lineno <= line <= end:
                return node.lineno, end
        return line, line

    def _reaching(self, first: int, last: int) -> frozenset[str]:
        names = itertools.chain(*(self.contexts.get(n, ()) for n in range(first, last + 1)))
        # A process that a test started is in "TEST (call)", a rank in "TEST (call)|ITS TEST".
        split = (re.split(r" \((?:setup|call|teardown)\)\|?", name) for name in names)
        return frozenset(next(filter(None, reversed(parts)), "") for parts in split) - {""}


def worth_drawing(operator: str) -> bool:
    """Whether a change could be an honest mistake."""
    kind, _, change = operator.partition("/")[2].partition("_")
    old, _, new = change.partition("_")
    if kind == "ReplaceBinaryOperator":
        return (old in ARITHMETIC) == (new in ARITHMETIC)
    if kind == "ReplaceComparisonOperator":
        return (old in ("Is", "IsNot")) == (new in ("Is", "IsNot"))
    return kind != "ReplaceUnaryOperator" or "Delete" in (old, new)


def draw(modules: dict[str, Module], number: int, seed: int) -> list:
    """`number` mutants in as many places, evenly over the code that tests reach."""
    places = defaultdict(list)
    with use_db(":memory:") as everything:
        init([Path(name) for name in modules], everything, {})
        for item in everything.work_items:
            change = item.mutations[0]
            if worth_drawing(change.operator_name):
                places[str(change.module_path), change.start_pos].append(item)
    generator = random.Random(seed)
    reached, missed = [], Counter()
    for (name, position), items in sorted(places.items()):
        operator = items[0].mutations[0].operator_name
        if modules[name].is_noise(*position) or (
            "BinaryOperator" in operator and not modules[name].is_arithmetic(*position)
        ):
            continue
        if modules[name].tests(position[0]):
            items.sort(key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence))
            reached.append(generator.choice(items))
        else:
            missed[name] += 1
    print(f"{len(reached)} places, and {missed.total()} that no fast test reaches: {dict(missed)}")
    first, step = generator.random(), max(len(reached) / number, 1)
    return [reached[int((first + i) * step)] for i in range(min(number, len(reached)))]


def choose_tests(names, seconds: dict[str, float], package: str, limit: float) -> list[str]:
    """The cheapest tests, up to so many seconds in all, file by file, the package's own first."""
    tests = [t for t in seconds if t in names or t.split("::")[0] in names]
    tests.sort(key=seconds.get)
    total = list(itertools.accumulate(seconds[t] for t in tests))
    files = defaultdict(list)
    for test, so_far in zip(tests, total, strict=True):
        if so_far <= limit or test == tests[0]:
            files[test.split("::")[0]].append(test)
    cost = {f: (f.split("/")[1] != package, sum(map(seconds.get, files[f]))) for f in files}
    return [test for file in sorted(files, key=cost.get) for test in files[file]]


def verdict(result) -> tuple[str, str]:
    """killed, survived or timed out; and the test that failed."""
    if result.output == "timeout":
        return "timed out", ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", result.output, re.MULTILINE)
    if result.test_outcome == TestOutcome.SURVIVED:
        return "survived", result.output.strip().splitlines()[-1]
    return "killed", found[1] if found else result.output[-200:].strip().replace("\n", " ")


def write_table(path: Path, done) -> None:
    rows, count = [], Counter()
    for item, result in done:
        lines = (result.diff or "").splitlines()
        old, new = ([x[1:].strip() for x in lines if re.match(rf"[{s}](?![{s}])", x)] for s in "-+")
        change, (outcome, test) = item.mutations[0], verdict(result)
        count[outcome] += 1
        what = f"`{' '.join(old)}` -> `{' '.join(new)}`".replace("|", "\\|")
        place = str(change.module_path), change.start_pos[0]
        rows.append((place, f"| {place[0]}:{place[1]} | {what} | {outcome} | {test} |"))
    figures = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
    head = [
        f"{len(rows)} mutants: {figures}",
        "",
        "| place | change | result | test |",
        "|-|-|-|-|",
    ]
    path.write_text("\n".join([*head, *(row for _, row in sorted(rows))]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--number", type=int, default=150, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one mutant")
    parser.add_argument(
        "--again", action="store_true", help="survivors, against --seconds of tests"
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="those that may kill a mutant")
    args = parser.parse_args()
    folder = ROOT / "runs/mutants" / git("rev-parse", "--short=10", "HEAD").strip()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare(folder, args.tests)
    os.chdir(folder / "tree")
    seconds = json.loads((folder / "seconds.json").read_text())
    data = coverage.CoverageData(folder / "coverage")
    data.read()
    modules = {}
    for part in map(Path, CODE):
        for path in sorted(part.rglob("*.py")) if part.is_dir() else [part]:
            modules[str(path)] = Module(path, data.contexts_by_lineno(str(path.resolve())))
    with use_db(folder / f"session-{args.seed}-{args.number}.sqlite") as session:
        if not session.num_work_items:
            session.add_work_items(draw(modules, args.number, args.seed))
        todo = session.pending_work_items
        if args.again:
            args.seconds *= 10
            done = session.completed_work_items
            todo = [item for item, result in done if verdict(result)[0] != "killed"]
        for item in todo:
            change = item.mutations[0]
            names = modules[str(change.module_path)].tests(change.start_pos[0])
            tests = choose_tests(names, seconds, change.module_path.parts[1], args.seconds)
            chosen = folder / "chosen.txt"
            chosen.write_text("\n".join(tests))
            command = shlex.join([*PYTEST, "-x", "--tb=line", f"@{chosen}"])
            timeout = 120 + 4 * sum(map(seconds.get, tests))
            result = mutate_and_test(item.mutations, command, timeout)
            if result.worker_outcome != WorkerOutcome.NORMAL:
                sys.exit(f"error: {change} could not be tried: {result.output}")
            session.set_result(item.job_id, result)
            outcome, test = verdict(result)
            place = f"{change.module_path}:{change.start_pos[0]}:{change.start_pos[1]}"
            print(f"{outcome} {place} {change.operator_name} {test}", flush=True)
            write_table(
                folder / f"table-{args.seed}-{args.number}.md", session.completed_work_items
            )


if __name__ == "__main__":
    main()
