"""Where this code lies: in a checkout, or in the package `fewhours` that pip installs."""

import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = __name__.removesuffix("utils.place")  # before the names of modules: "" or "fewhours."
ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the package
RECIPES = ROOT / "recipes"
ENTRIES = ROOT / "entries" if PACKAGE else ROOT  # the folder of the entry scripts
# Commands in a checkout, and what they are called where the package is installed.
CALLS = {
    r"python (resnet50|vit|transformer)_test\.py": r"fewhours \1",
    r"usage: (resnet50|vit|transformer)_test\.py": r"usage: fewhours \1",
    r"python train\.py": "fewhours",
    r"bash run_distributed\.sh": "fewhours launch",
    r"fewhours launch (resnet50|vit|transformer)_test\.py": r"fewhours launch \1",
    r"bash tuning/(\w+)_tuning\.sh": r"fewhours tune \1",
    r"python -m utils\.reporting\.compare": "fewhours compare",
    r"python -m utils\.data\.images\.pack": "fewhours pack",
}


def as_called(text: str) -> str:
    """A text for the user, whose commands work here."""
    for in_checkout, call in CALLS.items() if PACKAGE else ():
        text = re.sub(in_checkout, call, text)
    return text


def resolve(place: str) -> Any:
    """The object that "utils.module:name" names."""
    return pkgutil.resolve_name(PACKAGE + place)


def import_entry(name: str) -> ModuleType:
    """The entry script NAME.py as a module."""
    return importlib.import_module(f"{PACKAGE}entries.{name}" if PACKAGE else name)


def python_path() -> dict[str, str]:
    """Environment variables with which `python -P -m` finds this code."""
    if PACKAGE:  # installed where Python looks
        return {}
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([others] if others else [])])}


def launcher_command() -> list[str]:
    """What starts the launcher; its arguments follow."""
    if PACKAGE:
        return [sys.executable, "-P", "-m", f"{PACKAGE}utils.launch.launcher"]
    return ["bash", str(ROOT / "run_distributed.sh")]
