"""An optimizer is one file and one line: Lion (tests/worked_example/) in a copy of the project.

Nothing else is needed for its flags, help, training, resuming, the search and the tests that run
over every optimizer; one test prints the row that the page of flags then lacks.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from project_copy import ROOT, copy_project
from quick_runs import QUICK_PROCESSES
from short_runs import call, write_data

LINE = '    "lion": "utils.optim.lion:LION",\n'
RUN = (
    "python resnet50_test.py --optimizer lion --dataset shapes --subset 64 --depth 18 --width 4 "
    "--bs 16 --epochs 1 --save_every 1 --threads 1 --device cpu"
)
STEPS = 4  # in the epoch


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project's tracked files, with Lion's file and its line in the table."""
    folder = copy_project(tmp_path_factory.mktemp("checkout"))
    shutil.copy(ROOT / "tests/worked_example/lion.py", folder / "utils/optim/lion.py")
    table = folder / "utils/optim/table.py"
    before, after = table.read_text().split("}\n", 1)
    table.write_text(f"{before}{LINE}}}\n{after}")
    return folder


def said(checkout: Path, folder: Path, command: str) -> str:
    """The output of a command, which must succeed."""
    command = f"PYTHONPATH={shlex.quote(QUICK_PROCESSES)} {command}"
    done = call(checkout, command, folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(checkout: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], cwd=checkout, capture_output=True, text=True, timeout=PATIENCE
    )


def run_pytest(checkout: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs tests of the copy: their files, then which of their names (-k)."""
    *files, names = words
    return python(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", names)


def test_help_has_it_with_its_flag_and_defaults(checkout, tmp_path):
    text = " ".join(said(checkout, tmp_path, "python resnet50_test.py --help all").split())
    assert re.search(r"one of sgd, adamw, [a-z, ]+, lion, or FILE.py:NAME;", text)
    assert re.search(r"--lion_beta2 FLOAT How much .*? default: 0.99\)", text)
    assert "0.0001 with lion" in text and "plain with madgrad and lion" in text
    assert text.index("--ngd_norm") < text.index("--lion_beta2") < text.index("--lookahead_k")
    code = "import sys, resnet50_test; assert 'torch' not in sys.modules"
    assert python(checkout, "-c", code).returncode == 0


def test_settings_know_it(checkout):
    """Its flag has an effect with it alone, and FSDP can shard its parameters."""
    code = """
from resnet50_test import Settings
from utils.settings.config import parse
made, _ = parse(Settings, "--optimizer lion --lion_beta2 0.95 --distributed".split(), "")
assert (made.lr, made.weight_decay, made.momentum) == (1e-4, 0.5, 0.9)
parse(Settings, "--optimizer lion --distributed --strategy fsdp".split(), "")
parse(Settings, "--optimizer sgd --lion_beta2 0.95".split(), "", print)
"""
    done = python(checkout, "-c", code)
    assert done.stdout == "note: --lion_beta2 has no effect: --optimizer sgd does not use it\n", (
        done.stderr
    )


def test_the_search_has_its_ranges(checkout):
    code = """
import sys
sys.path.append("tests/tuning")
from test_tuning_space import ranges_of, space_of
from small_spaces import RESNET50, TRANSFORMER
for target in (RESNET50, TRANSFORMER):
    space, _, _ = space_of(target.space, "--optimizer", "lion", target=target)
    print([ranges_of(space)[name] for name in ("lr", "weight_decay", "lion_beta2")])
"""
    done = python(checkout, "-c", code)
    assert done.stdout == 2 * "[(1e-05, 0.002), (0.01, 5.0), (0.9, 0.999)]\n", done.stderr


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run_to_the_bit(checkout, tmp_path):
    out = said(checkout, tmp_path, f"{RUN} --output whole")
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    assert (summary["optimizer"], summary["steps"]) == ("lion", STEPS), out
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for step in (STEPS - 1, STEPS):
        shutil.rmtree(tmp_path / f"half/checkpoints/step-{step:08}", ignore_errors=True)
    out = said(checkout, tmp_path, "python resnet50_test.py --resume half")
    assert f"from step {STEPS - 2}" in out
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, half = (
            (tmp_path / run / f"checkpoints/step-{STEPS:08}" / file).read_bytes()
            for run in ("whole", "half")
        )
        assert whole == half, file


@pytest.mark.slow
def test_a_search_ends_with_a_recipe(checkout, tmp_path):
    write_data(tmp_path)
    said(
        checkout,
        tmp_path,
        "bash tuning/resnet50_tuning.sh --optimizer lion --dataset imagefolder --data_dir pictures "
        "--depth 18 --width 4 --bs 16 --epochs 1 --threads 1 --device cpu --val_fraction 0.25 "
        "--jobs 1 --trials 2 --no_prune --confirm 0 --params lr,lion_beta2 --output study",
    )
    recipe = (tmp_path / "study/best.yaml").read_text()
    assert "\noptimizer: lion\n" in recipe and "\nlr: " in recipe


@pytest.mark.slow
def test_the_tests_of_every_optimizer_pass(checkout):
    """Flagged steps, checkpoints, frozen parameters, what its entry says."""
    files = ("factory", "optimizer_steps", "optimizer_entries")
    done = run_pytest(checkout, *(f"tests/optim/test_{name}.py" for name in files), "lion")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30


@pytest.mark.slow
def test_the_page_of_flags_lacks_a_row_that_its_test_shows(checkout):
    words = "tests/end_to_end/test_docs.py", "lion or every_flag or flags_that_are_named"
    done = run_pytest(checkout, *words)
    row = re.search(r"AssertionError: docs/flags.md: (\| `lion` .*\|)$", done.stdout, re.M)
    assert done.returncode == 1 and row, done.stdout
    page = checkout / "docs/flags.md"
    content = page.read_text()
    last = next(line for line in content.splitlines() if line.startswith("| `ngd` |"))
    page.write_text(content.replace(last, f"{last}\n{row[1]}"))
    done = run_pytest(checkout, *words)
    page.write_text(content)
    assert done.returncode == 0, done.stdout
