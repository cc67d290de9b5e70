"""benchmarks/cpu.py and gpu.py: which contenders run, and a small run."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_comparisons import TINY, InThisProcess, options_of, result_of

from benchmarks import compare, gpu, speed
from benchmarks.cases import Case
from benchmarks.contenders import Rule
from utils.errors import UserError

ROOT = Path(__file__).parents[2]


def test_compiled_contenders_are_made_ready_last():
    ours = ["ours", "ours, memory", "ours, speed"]
    few, many = (
        ["plain loop", "autocast", *ours],
        ["plain loop", "autocast", "autocast, kept", *ours],
    )
    graphs, stock = ["ours, speed, graphs"], ["compile", "compile, graphs"]
    for kind in ("pictures", "texts"):
        assert list(speed.ways_of(kind, "bf16", cuda=False, compiled=False)) == many
        assert list(speed.ways_of(kind, "bf16", cuda=False, compiled=True)) == [*many, "compile"]
    ways = speed.ways_of("pictures", "bf16", cuda=True, compiled=True)
    assert list(ways) == [*few, *graphs, *stock, "ours, compile"]
    assert ways["compile, graphs"].graphs and not ways["compile"].graphs
    texts = speed.ways_of("texts", "bf16", cuda=True, compiled=True)
    assert list(texts) == [*few, "compile", "ours, compile"]


def test_workers_are_few_on_a_cpu_and_where_shared_memory_is_small(monkeypatch, capsys):
    monkeypatch.setattr(speed.os, "cpu_count", lambda: 64)
    assert speed.default_workers(torch.device("cpu")) == 2
    usage = {"/dev/shm": SimpleNamespace(free=64e9)}
    monkeypatch.setattr(speed.shutil, "disk_usage", lambda path: usage[path])
    assert speed.default_workers(torch.device("cuda")) == 16
    usage["/dev/shm"].free = 1e9  # they would die of a bus error
    assert speed.default_workers(torch.device("cuda")) == 3
    assert "--shm-size" in capsys.readouterr().err
    usage["/dev/shm"].free = 64e6  # Docker's default
    with pytest.raises(UserError, match=r"64 MB free.*--shm-size"):
        speed.default_workers(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_one_line_says_that_there_is_no_gpu(capsys, tmp_path):
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_case_that_fails_does_not_stop_the_other(monkeypatch, tmp_path, capsys):
    def broken(*args):
        raise RuntimeError("no memory")

    def no_plot(*args):
        raise ImportError("No module named 'matplotlib'")

    figures = result_of({"plain loop": [1.0], "ours": [2.5]})["cases"]["A net, batch 4"]
    case = Case("A net", None, 4, Rule("sgd", 0.1, 0.0), None, None, None, None)
    monkeypatch.setattr(speed, "CASES", {"texts": broken, "pictures": lambda *args: case})
    monkeypatch.setattr(speed, "compare", lambda *args: figures)
    monkeypatch.setattr(speed, "draw", no_plot)
    path = tmp_path / "cpu.json"
    speed.run(options_of(path, "--no_compile"), TINY)
    result = json.loads(path.read_text())
    assert result["cases"] == {"A net": figures, "texts": {"failed": "RuntimeError: no memory"}}
    assert result["machine"]["workers"] == 0
    said = capsys.readouterr().out
    assert "It failed: RuntimeError: no memory" in said
    assert said.index("| plain loop |") < said.index("no plot: No module named 'matplotlib'")


@pytest.mark.slow
def test_a_small_run_measures_contenders_in_their_processes(tmp_path, monkeypatch):
    """Three of them; all, and texts, are measured in the test below."""
    ways = {"plain loop", "ours", "ours, memory"}
    real = speed.ways_of
    monkeypatch.setattr(
        speed, "ways_of", lambda *args: {n: way for n, way in real(*args).items() if n in ways}
    )
    path = tmp_path / "cpu.json"
    speed.run(options_of(path, "--no_compile", "--only", "pictures"), TINY)
    result = json.loads(path.read_text())
    assert len(result["cases"]) == 1
    for case in result["cases"].values():
        assert not case["left_out"]
        assert set(case["samples_per_second"]) == set(case["ways"]) == ways
        assert all(len(speeds) == 2 for speeds in case["samples_per_second"].values())
        for shares in case["shares"].values():
            assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert min(case["peak_bytes"].values()) > 1 << 20
        kept = case["bytes_kept_per_sample"]
        assert kept["ours, memory"] < kept["ours"] < kept["plain loop"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_comparison_on_a_gpu_rehearsed_on_a_cpu(tmp_path, monkeypatch):
    """With its contenders, except compiled ones, which take minutes on a CPU. The one with CUDA
    graphs is left out, as there is no GPU, and costs the others nothing."""
    real = speed.ways_of
    monkeypatch.setattr(
        speed, "ways_of", lambda kind, precision, cuda, compiled: real(kind, precision, True, False)
    )
    cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    there = SimpleNamespace(cuda=cuda, device=lambda *_: torch.device("cpu"))
    monkeypatch.setattr(gpu, "torch", there)
    monkeypatch.setattr(compare, "ChildContender", InThisProcess)
    monkeypatch.setattr(gpu, "SIZES", dataclasses.replace(TINY, race=gpu.SIZES.race))
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path), "--workers", "0", "--repetitions", "2"]) == 0
    cases = json.loads(path.read_text())["cases"]
    texts, pictures = sorted(cases.values(), key=lambda case: len(case["ways"]))
    assert not texts["left_out"]
    assert set(pictures["left_out"]) == {"ours, speed, graphs"}
    kept = pictures["bytes_kept_per_sample"]
    assert kept["ours, speed"] <= kept["ours"]
    for case in (texts, pictures):
        done = set(case["ways"]) - set(case["left_out"])
        assert {"plain loop", "autocast", "ours", "ours, memory", "ours, speed"} == done
        assert all(len(case["samples_per_second"][name]) == 2 for name in done)


@pytest.mark.slow
def test_a_script_has_help():
    """Started as a file, from anywhere."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), "--help"], cwd=ROOT.parent,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "make bench" in done.stdout
