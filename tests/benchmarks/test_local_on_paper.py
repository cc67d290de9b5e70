"""benchmarks/local_on_paper.py: limits of its estimates, and the rows that its page has of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.local_on_paper import LINKS, compute, ddp, local, regions, table
from benchmarks.scaling_on_paper import FLOAT, MODELS, SIZES

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
    slow, length = regions(1), FLOAT * model.parameters
    assert local(model, slow, gpus, 0.0) == compute(model)
    # DDP's backward pass hides something, an averaging in every step hides nothing.
    least = compute(model) + length / slow.across
    assert compute(model) < ddp(model, slow, gpus) < local(model, slow, gpus, 1.0) + 1
    assert least < local(model, slow, gpus, 1.0) < least + 1.3 * length / slow.across + 1
    # Without latency, and with fast links within a region, only the line between them counts: once
    # in each direction, at the same time if the chain is short.
    ideal = replace(slow, between=1e30, step_between=0.0, latency=0.0)
    chain = ideal.chain(length, gpus // min(8, gpus // 2), 64) * slow.across / length
    assert 1 < chain < 2 if gpus > 16 else chain == pytest.approx(65 / 64)


@pytest.mark.parametrize("nodes", (2, 4, 10))
def test_a_single_chunk_goes_there_and_back(nodes):
    slow, length = regions(1), 1e6
    within = slow.step_between + length / slow.between
    hops = slow.latency + length / slow.across + (nodes - 2) * within
    assert slow.chain(length, nodes, 1) == pytest.approx(2 * hops)
