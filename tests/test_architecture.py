"""Rules that concern all modules: imports, pickles, import-time work."""

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "utils").rglob("*.py"), *(ROOT / "tuning").rglob("*.py")])
UNPICKLER = "utils/data/images/cifar.py"  # the one restricted unpickler

IMPORT_ALL = """
import sys, threading, matplotlib.figure, torch, torchvision, yaml, tqdm, safetensors.torch
import PIL.Image, PIL.ImageOps, multiprocessing, concurrent.futures.thread, logging, urllib.request
import argparse, tarfile, uuid, resource, optuna, optuna.importance, optuna.storages.journal
import timm
opened = []
def watch(event, details):
    if event == "open" and not str(details[0]).endswith((".py", ".pyc", ".so")):
        opened.append(str(details[0]))
    if event.startswith(("subprocess.", "socket.connect", "os.mkdir")):
        opened.append(event)
before = threading.active_count()
random_state = torch.random.get_rng_state()
sys.addaudithook(watch)
for name in sys.argv[1:]:
    __import__(name)
assert not opened, opened
assert threading.active_count() == before
assert torch.equal(random_state, torch.random.get_rng_state())
"""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def dotted(node) -> str:
    """ "a.b.c" of nested attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def imported(tree) -> set[str]:
    """Every module and every name of a module that the tree imports, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


@functools.cache  # two tests look through all modules
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def uses_distributed(source: str) -> bool:
    tree = parsed(source)
    names = imported(tree) | {dotted(node) for node in ast.walk(tree)}
    return any(f"{name}.".startswith("torch.distributed.") for name in names)


# Functions of torch.distributed that send objects, as pickles.
OF_OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip


def pickle_uses(source: str) -> list[str]:
    """What could load a pickle: the pickle modules, torch.load and np.load without their guard, and
    the collectives by which ranks send each other pickles."""
    tree = parsed(source)
    banned = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = sorted(name for name in imported(tree) if name.split(".")[0] in banned)
    guards = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in guards:
            name, needed = guards[dotted(node.func)]
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            # np.load refuses pickles unless it is told otherwise.
            if given.get(name, needed if name == "allow_pickle" else None) is not needed:
                found.append(f"{dotted(node.func)} in line {node.lineno}")
        if isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS:
            found.append(f"{node.attr} in line {node.lineno}")
    last = {name: name.rpartition(".")[2] for name in imported(tree)}
    return found + sorted(n for n in last if n == "torch.load" or last[n] in OF_OBJECTS)


def test_import_contracts():
    """What `make lint` runs, with the linter that belongs to this interpreter."""
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("import torch\ndef f():\n    return torch.distributed.is_initialized()", True),
        ("import torch\ntorch.distributions.Beta(1, 1)", False),
    ],
)
def test_every_form_of_importing_torch_distributed_is_found(source, uses):
    assert uses_distributed(source) is uses


@pytest.mark.slow
def test_torch_distributed_is_imported_where_processes_are_known():
    packages = {"distributed", "launch"}
    outside = [path for path in MODULES if not packages & {*path.relative_to(ROOT).parts}]
    assert [module_name(p) for p in outside if uses_distributed(p.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("import pickle", False),
        ("from pickle import loads", False),
        ("import torch\ntorch.load('x')", False),
        ("import torch\ntorch.load('x', weights_only=False)", False),
        ("from torch import load", False),
        ("import torch\ntorch.load('x', weights_only=True)", True),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", False),
        ("import numpy as np\nnp.load('x')", True),
        ("import torch.distributed as dist\ndist.all_gather_object([], 0)", False),
        ("import torch\nf = torch.distributed.broadcast_object_list", False),
        ("from torch.distributed import scatter_object_list", False),
        ("import torch.distributed as dist\ndist.all_gather([], 0)", True),
    ],
)
def test_every_form_of_loading_pickles_is_found(source, allowed):
    assert (pickle_uses(source) == []) is allowed


def test_no_pickle_is_loaded():
    found = {}
    for path in MODULES:
        uses = pickle_uses(path.read_text("utf-8"))
        if uses:
            found[path.relative_to(ROOT).as_posix()] = uses
    assert found.pop(UNPICKLER, ["pickle"]) == ["pickle"]
    assert found == {}


def test_the_unpickler_admits_names_one_by_one():
    """pickle occurs in cifar.py only as the base of an unpickler with its own find_class."""
    tree = ast.parse((ROOT / UNPICKLER).read_text("utf-8"))
    unpicklers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(dotted, node.bases)
    ]
    assert len(unpicklers) == 1
    methods = [node.name for node in unpicklers[0].body if isinstance(node, ast.FunctionDef)]
    assert "find_class" in methods
    uses = {dotted(node) for node in ast.walk(tree)}
    assert not uses & {"pickle.load", "pickle.loads"}


def test_light_modules_do_not_import_torch():
    """So that --help and wrong flags answer at once."""
    modules = [
        "utils.settings", "utils.entry", "utils.runs.run", "utils.data.images.sources",
        "utils.local.rules",
        "resnet50_test", "transformer_test", "tuning.entry", "benchmarks.child",
    ]  # fmt: skip
    code = "import sys\nfor name in sys.argv[1:]:\n    __import__(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    result = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_importing_everything_does_no_work():
    """No module of ours opens a file, starts a thread or draws a random number on import."""
    names = [module_name(path) for path in MODULES] + ["resnet50_test"]
    if importlib.util.find_spec("triton") is None:  # PyTorch for CPUs comes without it
        names = [name for name in names if not name.endswith("_kernels")]
    result = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_programs_are_executable_and_say_what_runs_them():
    """`./run_distributed.sh` and `./resnet50_test.py` work; what is sourced is no program."""
    shell = [ROOT / "run_distributed.sh", *ROOT.glob("tuning/*_tuning.sh")]
    python = [*ROOT.glob("*_test.py")]
    assert len(shell) == 5 and len(python) == 3
    for paths, first in ((shell, "#!/usr/bin/env bash"), (python, "#!/usr/bin/env python3")):
        for path in paths:
            assert path.read_text(encoding="utf-8").startswith(first + "\n"), path
            assert path.stat().st_mode & 0o111 == 0o111, path
    assert not (ROOT / "tuning" / "run.sh").stat().st_mode & 0o111
