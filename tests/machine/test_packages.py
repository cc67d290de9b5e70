"""The tables of packages, the extras of pyproject.toml and the requirements*.txt agree."""

import re
import tomllib
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.machine import packages
from utils.machine.packages import NEEDED, OF_GPUS, OPTIONAL

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
_LINE = re.compile(r"([\w-]+) *>=([\d.]+)")


def bounds(lines: list[str]) -> dict[str, str]:
    """{package: its lower bound}."""
    return dict(_LINE.match(line).groups() for line in lines)


def required(file: str) -> dict[str, str]:
    return dict(re.findall(f"^{_LINE.pattern}", (ROOT / file).read_text(), re.M))


def of_extras(*names: str) -> dict[str, str]:
    return bounds([line for name in names for line in EXTRAS[name]])


def test_the_requirements_are_those_of_the_project():
    (extra,) = EXTRAS["all"]
    names = re.fullmatch(r"fewhours\[(.+)\]", extra)[1].split(",")
    assert required("requirements.txt") == bounds(PROJECT["dependencies"]) | of_extras(*names)
    known = of_extras(*(EXTRAS.keys() - {"all"}))
    for file in (
        "requirements-dev",
        "requirements-dali",
        "requirements-ort",
        "tests/dali/requirements",
    ):
        for name, bound in required(f"{file}.txt").items():
            assert known.get(name, bound) == bound, file


def test_the_tables_are_those_of_the_project():
    assert {package.name for package in NEEDED} == bounds(PROJECT["dependencies"]).keys()
    extras = of_extras(*(EXTRAS.keys() - {"all"})).keys()
    listed = {package.name for package in (*OPTIONAL, *OF_GPUS)}
    # Which package DALI is depends on the driver, and PyTorch brings Triton.
    assert listed ^ extras == {"nvidia-dali-cuda130", "triton"}
    assert packages.missing_text(NEEDED) == ""


def test_what_is_missing_is_named_with_the_flag(monkeypatch):
    missing = {"onnx": None, "onnxscript": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: missing.get(name, "a spec"))
    packages.require("--wandb online", "wandb")
    with pytest.raises(UserError) as told:
        packages.require("--export onnx", "onnx", "onnxscript")
    assert str(told.value) == "--export onnx needs 2 more packages: pip install onnx onnxscript"
    with pytest.raises(UserError, match=r"--engine ort needs one more package: pip install onnx$"):
        packages.require("--engine ort", "onnx", "onnxruntime")
    assert packages.left_out("matplotlib", "plots") == ""
    missing["matplotlib"] = None
    assert packages.left_out("matplotlib", "plots").endswith(": pip install matplotlib")
