"""benchmarks/cpu.py, gpu.py and the page that they fill: a small run, and the page's pieces."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, gpu, performance_page, speed
from benchmarks.contenders import Way, compiled_way, our_ways, pad, usual_ways
from utils.fused import MODES

ROOT = Path(__file__).parents[1]
TINY = dataclasses.replace(
    cpu.SIZES, depth=18, picture_batch=4, pictures=40, layers=1, dim=64, ffn=64, text_batch=8,
    texts=200, turn_seconds=0.1,
)  # fmt: skip


def options_of(path: Path, *words: str):
    parser = speed.flags("small", minutes=10, repetitions=2)
    options = parser.parse_args(["--json", str(path), "--workers", "0", *words])
    options.torch_device = torch.device("cpu")
    return options


def result_of(speeds: dict[str, list[float]], device: str = "cpu") -> dict:
    case = {
        "ways": {name: "as it is" for name in speeds} | {"compile": "torch.compile"},
        "left_out": {"compile": "no time was left"},
        "samples_per_second": speeds,
        "ratios": {"ours / plain loop": {"median": 2.5, "min": 2.0, "max": 3.0}},
        "seconds_of_the_first_step": dict.fromkeys(speeds, 1.25),
        "shares": {
            name: {"data": 0.5, "forward_backward": 0.3, "optimizer": 0.2} for name in speeds
        },
        "peak_bytes": dict.fromkeys(speeds),
        "bytes_kept_per_sample": {"ours": 1.5e6},
    }
    race = {
        "what": "ResNet-18 of width 8 on 100 real pictures",
        "target": 45,
        "curves": {"plain loop": [[10.0, 30.0], [20.0, 50.0]], "ours": [[4.0, 31.0], [8.0, 44.0]]},
        "seconds_to_target": {"plain loop": 20.0, "ours": None},
    }
    return {
        "machine": {"cpu": "a cpu", "device": device},
        "cases": {"A net, batch 4": case},
        "race": race,
    }


def test_tables_have_each_way():
    text = performance_page.tables(result_of({"plain loop": [1.0, 3.0], "ours": [4.0, 6.0]}))
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
    once = performance_page.replace_section(page, "cpu", "new\n")
    assert once == "a\n<!-- cpu: begin -->\nnew\n<!-- cpu: end -->\nb\n"
    assert performance_page.replace_section(once, "cpu", "new\n") == once
    with pytest.raises(ValueError, match="no marks"):
        performance_page.replace_section(page, "cuda", "new\n")


def test_page_has_marks_for_both_devices():
    page = performance_page.PAGE.read_text()
    for device in ("cpu", "cuda"):
        performance_page.replace_section(page, device, "")


def test_figures_on_the_page_are_those_of_its_json():
    """What the page says was not typed."""
    page = performance_page.PAGE.read_text()
    for path in (performance_page.PAGE.parent / "performance").glob("*.json"):
        assert performance_page.tables(json.loads(path.read_text())) in page


def test_plot_is_drawn(tmp_path):
    performance_page.draw(result_of({"plain loop": [1.0], "ours": [2.5]}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_ways():
    usual = compiled_way("bf16", ("NCHW", "channels_last"))
    assert usual["compile"] == Way(False, "bf16, channels_last, torch.compile", "bf16", True, True)
    ours = our_ways("bf16", False, False)
    assert [way.fused for way in ours.values()] == list(MODES)
    more = our_ways("bf16", True, True)
    assert sum(way.graphs for way in more.values()) == 2 and more["ours, compile"].compiled


def test_texts_are_padded_to_the_longest():
    ids, labels = pad([(torch.tensor([1, 2, 3]), 0), (torch.tensor([4]), 2)])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and labels.tolist() == [0, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys, tmp_path):
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_run_is_left_out(tmp_path):
    case = speed.text_case(TINY, torch.device("cpu"), 0)
    ways = usual_ways("bf16", ("padded", "padded"))
    ways["broken"] = Way(True, "none such", "bf16", True, fused="none such")
    ways["graphs"] = Way(True, "no GPU", "bf16", True, graphs=True)
    options = options_of(tmp_path / "x.json")
    found = speed.compare(case, ways, TINY, options, speed.Budget(10), tmp_path)
    assert list(found["left_out"]) == ["broken", "graphs"]
    assert "ValueError" in found["left_out"]["broken"]
    assert "there is no GPU" in found["left_out"]["graphs"]
    assert {name: len(values) for name, values in found["samples_per_second"].items()} == {
        "plain loop": 2, "autocast": 2,
    }  # fmt: skip
    none = speed.compare(case, ways, TINY, options, speed.Budget(0), tmp_path)
    assert set(none["left_out"].values()) == {"no time was left"}


def test_what_is_not_ready_in_time_is_left_out(tmp_path, monkeypatch):
    """As torch.compile, which turns what goes wrong within it into errors of its own."""

    def endless(*args):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(1)

    monkeypatch.setattr(speed, "contender", endless)
    monkeypatch.setattr(speed, "LEAST_SECONDS", 0)
    case = speed.text_case(TINY, torch.device("cpu"), 0)
    ways = {"endless": Way(False, "none such")}
    options = options_of(tmp_path / "x.json")
    found = speed.compare(case, ways, TINY, options, speed.Budget(0.02), tmp_path)
    assert found["left_out"] == {"endless": "not ready after 1 s"}


@pytest.mark.slow
def test_small_run(tmp_path):
    path = tmp_path / "cpu.json"
    speed.run(options_of(path, "--no_compile"), TINY)
    result = json.loads(path.read_text())
    assert len(result["cases"]) == 2
    for case in result["cases"].values():
        assert not case["left_out"]
        assert set(case["samples_per_second"]) == set(case["ways"])
        assert all(len(speeds) == 2 for speeds in case["samples_per_second"].values())
        for shares in case["shares"].values():
            assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        kept = case["bytes_kept_per_sample"]
        assert kept["ours, memory"] < kept["ours"] < kept["plain loop"]
        assert kept["ours, speed"] <= kept["ours"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_help_of_a_script():
    """Started as a file, from anywhere."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), "--help"], cwd=ROOT.parent,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "make bench" in done.stdout
    assert performance_page.main(["--help"]) == 0
