#!/usr/bin/env python3
"""How well runs keep to --time_budget: seconds from the command to its last written file.

    python benchmarks/time_budget.py --output runs/budgets
    python benchmarks/time_budget.py --output runs/budgets --budgets 60 180 --data_dir PICTURES

Pictures (recipes/cifar10_cpu.yaml on shapes, or on train/ and test/ of --data_dir) and texts
(headlines, or --table), each alone, in two processes, with a neighbour that computes in the middle
third, and killed in the middle and resumed. There the time is that of the last checkpoint, which
the run counts, and that of the second command.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.studies import exit_code, markdown, parser, write_results
from utils.errors import UserError

ROOT = Path(__file__).parents[1]
CASES = ("alone", "two processes", "neighbour", "killed")
TEXTS = ["--dim", "128", "--layers", "2", "--heads", "4", "--batch_size", "32"]


def commands(options) -> dict[str, list[str]]:
    """{kind of data: entry and flags}."""
    cache = ["--cache_dir", str(options.cache_dir.resolve())]
    pictures = ["--config", str(ROOT / "recipes/cifar10_cpu.yaml"), *cache]
    if options.data_dir is None:
        pictures += ["--dataset", "shapes"]
    else:
        pictures += ["--data_dir", str(options.data_dir.resolve())]
    texts = ["--dataset", "headlines"]
    if options.table is not None:
        texts = ["--dataset", "ag_news", "--data_dir", str(options.table.resolve())]
    return {
        "pictures": ["resnet50_test.py", *pictures],
        "texts": ["transformer_test.py", *TEXTS, *texts, *cache],
    }


def measure(command: list[str], case: str, budget: float, folder: Path) -> float:
    """Seconds that the run took."""
    flags = [*command[1:], "--time_budget", f"{budget:g}s", "--save_every", "0.1m"]
    line = [sys.executable, ROOT / command[0], *flags, "--output", folder]
    environ = dict(os.environ)
    if case == "two processes":
        line = ["bash", ROOT / "run_distributed.sh", *line[1:]]
        environ |= {"NPROC": "2", "PYTHON": sys.executable}
    started, before = time.time(), 0.0
    run = subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL)
    if case == "neighbour":
        threading.Timer(budget / 3, compute, [budget / 3]).start()
    if case == "killed":
        time.sleep(budget / 2)
        run.send_signal(signal.SIGKILL)
        run.wait()
        last = max((folder / "checkpoints").glob("step-*/state.json"))
        before = json.loads(last.read_text())["progress"]["seconds_total"]
        started = time.time()
        run = subprocess.Popen([*line, "--resume", folder], stdout=subprocess.DEVNULL)
    if run.wait() != 0:
        raise UserError(f"{folder.name}: exit code {run.returncode}; see above")
    written = max(path.stat().st_mtime for path in folder.rglob("*") if path.is_file())
    return before + written - started


def compute(seconds: float) -> None:
    """Keeps a core busy."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(seconds)
    neighbour.kill()
    neighbour.wait()


def study(options) -> None:
    results = []
    for budget in options.budgets:
        for kind in options.kinds:
            for case in options.cases:
                folder = options.output / f"{kind}-{case.replace(' ', '-')}-{budget:g}s"
                try:
                    used = measure(commands(options)[kind], case, budget, folder)
                except UserError as error:  # it may be too short for this machine
                    print(error, flush=True)
                    continue
                summary = json.loads((folder / "summary.json").read_text())
                over = 100 * (used / budget - 1)
                results.append(
                    {"data": kind, "case": case, "asked": budget, "used": round(used, 1)}
                    | {"overrun_percent": round(max(0, over), 1)}
                    | {"unused_percent": round(max(0, -over), 1)}
                    | {"steps": summary["steps"], "plans": len(summary["time_plan"] or ())}
                )
                print(*results[-1].values(), flush=True)
    table = markdown([*results[0]], [[*map(str, row.values())] for row in results], left=2)
    write_results(options.output, {"results": results}, table, {})


def main() -> int:
    flags = parser(Path(__file__).name, __doc__, jobs=False)
    add = flags.add_argument
    add("--table", type=Path, help="AG News as CSV files (default: synthetic headlines)")
    add("--budgets", type=float, nargs="+", default=[60, 180], help="seconds")
    add("--kinds", nargs="+", choices=("pictures", "texts"), default=["pictures", "texts"])
    add("--cases", nargs="+", choices=CASES, default=CASES)
    options = flags.parse_args()
    return exit_code(lambda: study(options), "the start")


if __name__ == "__main__":
    sys.exit(main())
