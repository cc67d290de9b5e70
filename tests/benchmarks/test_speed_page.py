"""The page that benchmarks/cpu.py and gpu.py fill: its pieces."""

import json

import pytest
from small_comparisons import result_of

from benchmarks import speed_page


def test_tables_have_each_way():
    text = speed_page.tables(result_of({"plain loop": [1.0, 3.0], "ours": [4.0, 6.0]}))
    assert "| plain loop | as it is | 2 | 1 | 1.2 s |" in text
    assert (
        "| ours | as it is | 5 | 2.50 (2.00 to 3.00) | 1.2 s | 1.50 MB |  | 50 % | 30 % | 20 % |"
        in text
    )
    assert "| compile | torch.compile | left out: no time was left |" in text
    assert "| plain loop | 20.0 | 50.00 % | 20.0 |" in text
    assert "| ours | not reached | 44.00 % | 8.0 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][:4]
    assert len({line.count("|") for line in rows}) == 1


def test_section_of_a_page_is_replaced():
    page = "a\n<!-- cpu: begin -->\nold\n<!-- cpu: end -->\nb\n"
    once = speed_page.replace_section(page, "cpu", "new\n")
    assert once == "a\n<!-- cpu: begin -->\nnew\n<!-- cpu: end -->\nb\n"
    assert speed_page.replace_section(once, "cpu", "new\n") == once
    with pytest.raises(ValueError, match="no marks"):
        speed_page.replace_section(page, "cuda", "new\n")


def test_page_has_marks_for_both_devices():
    page = speed_page.PAGE.read_text()
    for device in ("cpu", "cuda"):
        speed_page.replace_section(page, device, "")


def test_figures_on_the_page_are_those_of_its_json():
    """They were not typed by hand."""
    page = speed_page.PAGE.read_text()
    for path in speed_page.PAGE.with_suffix("").glob("*.json"):
        assert speed_page.tables(json.loads(path.read_text())) in page


def test_the_plot_is_drawn(tmp_path):
    speed_page.draw(result_of({"plain loop": [1.0], "ours": [2.5]}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_has_help():
    assert speed_page.main(["--help"]) == 0
