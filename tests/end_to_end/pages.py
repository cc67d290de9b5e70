"""The README and docs/: their blocks of code, tables and words in `code`."""

import re
import tomllib
from pathlib import Path

import pytest

import resnet50_test
import transformer_test
import vit_test

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
ENTRIES = {
    "resnet50_test.py": resnet50_test,
    "transformer_test.py": transformer_test,
    "vit_test.py": vit_test,
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text(page: str) -> str:
    """A page, with continued lines of commands joined."""
    return re.sub(r" \\\n +", " ", (ROOT / page).read_text(encoding="utf-8"))


def blocks(language: str) -> list:
    """(page, text) of each code block, as parameters of a test."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for block in re.findall(rf"^```{language}\n(.*?)^```", text(name), re.M | re.S):
            found.append(pytest.param(block, id=f"{name}:{block.splitlines()[0][:60]}"))
    return found


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables below a heading (or the title), up to the next heading."""
    content = text(page)
    if heading:
        content = content.split(f"\n{heading}\n")[1]
    lines = [line for line in content.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def coded(content: str) -> set[str]:
    """The words in `code`."""
    return {word for code in re.findall(r"`([^`\n]+)`", content) for word in code.split()}
