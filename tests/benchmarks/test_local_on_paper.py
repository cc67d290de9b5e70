"""benchmarks/local_on_paper.py: limits of its estimates, and the rows that its page has of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.local_on_paper import LINKS, compute, ddp, local, regions, table
from benchmarks.scaling_on_paper import CLUSTERS, FLOAT, MODELS, SIZES

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "local.md"


def test_the_rows_of_the_page():
    """It leaves out some numbers of GPUs."""
    page = PAGE.read_text(encoding="utf-8").split("## Two regions")[1].split("\n## ")[0]
    told = [line for line in page.splitlines() if line.startswith("|")]
    made = [row for model in MODELS for link in LINKS for row in table(model, regions(link))]
    shown = ("| GPUs |", "| ---", "| 8 |", "| 32 |", "| 128 |", "| 512 |")
    assert told == [row for row in made if row.startswith(shown)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("gpus", SIZES)
def test_limits_of_two_regions(model, gpus):
    slow = regions(1)
    without_link = replace(slow, across=1e30, latency=0.0)
    within = CLUSTERS[0].all_reduce(FLOAT * model.parameters, gpus // 2)
    assert local(model, without_link, gpus, 1.0) == pytest.approx(compute(model) + within)
    assert local(model, slow, gpus, 0.0) == compute(model)
    # DDP's backward pass hides something, an averaging in every step hides nothing.
    assert compute(model) < ddp(model, slow, gpus) < local(model, slow, gpus, 1.0) + 1
    in_order = replace(slow, in_order=True)
    times = [local(model, each, gpus, 1 / 16) for each in (slow, in_order)]
    across = FLOAT * model.parameters / slow.across
    assert times[1] - times[0] == pytest.approx(gpus / 4 * across / 16)
