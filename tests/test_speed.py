"""benchmarks/cpu.py, gpu.py and the page that they fill: a small run, and the page's pieces."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE

from benchmarks import compare, cpu, gpu, host_memory, performance_page, speed
from benchmarks.budget import Budget, attempt, in_a_line
from benchmarks.cases import Case, text_case
from benchmarks.contenders import Rule, Way, pad
from benchmarks.fused import bytes_of_a_sample
from utils.models.resnet import ResNet

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


def test_ways_are_made_ready_with_what_is_compiled_last():
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


def test_both_have_the_same_rule(tmp_path):
    """The same rates and decays, of all parameters."""
    case = text_case(TINY, torch.device("cpu"), 0)
    options = options_of(tmp_path / "x.json")
    ours = compare.in_this_process(case, Way(True, ""), options, tmp_path)
    usual = compare.in_this_process(case, Way(False, ""), options, tmp_path)
    groups = [*ours.trainer.optimizer.param_groups, *usual.optimizer.param_groups]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(1e-4, 0.01)}
    assert type(ours.trainer.optimizer) is type(usual.optimizer) is torch.optim.AdamW


def test_workers_are_few_on_a_cpu(monkeypatch):
    monkeypatch.setattr(speed.os, "cpu_count", lambda: 64)
    assert speed.default_workers(torch.device("cpu")) == 2
    assert speed.default_workers(torch.device("cuda")) == 16


def test_texts_are_padded_to_the_longest():
    ids, labels = pad([(torch.tensor([1, 2, 3]), 0), (torch.tensor([4]), 2)])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and labels.tolist() == [0, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys, tmp_path):
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


class InThisProcess:
    """In place of benchmarks.compare.InAChild."""

    def __init__(self, make, environment=None):
        self.made = make()
        self.steps, self.shares, self.rest = self.made.steps, self.made.shares, self.made.rest

    def turn(self, count: int) -> tuple[float, int]:
        return self.made.turn(count)[0], 2 << 20

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "own_process", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "in children"]
)
def test_what_cannot_run_is_left_out(tmp_path, own_process, monkeypatch):
    monkeypatch.setattr(compare, "LEAST_SECONDS", PATIENCE)
    if not own_process:
        monkeypatch.setattr(compare, "InAChild", InThisProcess)
    case = text_case(TINY, torch.device("cpu"), 0)
    ways = {"plain loop": Way(False, "fp32, padded")}
    ways["broken"] = Way(True, "none such", "bf16", True, fused="none such")
    ways["graphs"] = Way(True, "no GPU", "bf16", True, graphs=True)
    options = options_of(tmp_path / "x.json")
    found = compare.compare(case, ways, TINY, options, Budget(9 * PATIENCE), tmp_path)
    assert list(found["left_out"]) == ["broken", "graphs"]
    assert found["left_out"]["broken"].startswith("ValueError: ")
    assert "there is no GPU" in found["left_out"]["graphs"]
    turns = {name: len(values) for name, values in found["samples_per_second"].items()}
    assert turns == {"plain loop": 2} and found["peak_bytes"]["plain loop"] > 1 << 20
    none = compare.compare(case, ways, TINY, options, Budget(0), tmp_path)
    assert set(none["left_out"].values()) == {"no time was left"}


def test_without_memory_nothing_is_begun_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "available_memory", lambda: 3.9e9)
    case = text_case(TINY, torch.device("cpu"), 0)
    options = options_of(tmp_path / "x.json")
    found = compare.compare(
        case, {"plain loop": Way(False, "")}, TINY, options, Budget(60), tmp_path
    )
    assert found["left_out"] == {"plain loop": "MemoryError: less than 4 GB of memory are left"}


def test_a_contender_of_ours_is_set_up_as_the_entries_do_it(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(compare, "keep_freed_memory", lambda: told.append("kept"))

    def made(case, way, *others) -> Fake:
        told.append(case)
        return Fake()

    monkeypatch.setattr(compare, "in_this_process", made)
    options = options_of(tmp_path / "x.json")
    for way in speed.usual_ways("bf16", ("", ""), cuda=False).values():
        compare.alone(lambda: "usual", way, options, tmp_path)
    assert told == ["usual", "usual", "kept", "usual"]
    compare.alone(lambda: "ours", speed.our_ways("bf16", False, False)["ours"], options, tmp_path)
    assert told[4:] == ["kept", "ours"]


def test_what_is_not_ready_in_time_is_left_out(tmp_path, monkeypatch):
    """As torch.compile, which turns what goes wrong within it into errors of its own."""

    def endless(*args):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(1)

    monkeypatch.setattr(compare, "contender", endless)
    monkeypatch.setattr(compare, "LEAST_SECONDS", 0)
    case = text_case(TINY, torch.device("cpu"), 0)
    ways = {"endless": Way(False, "none such")}
    options = options_of(tmp_path / "x.json")
    turns = 1.2 * TINY.turn_seconds * options.repetitions
    budget = SimpleNamespace(left=1.0 + turns)  # it stands still
    found = compare.compare(case, ways, TINY, options, budget, tmp_path)
    assert found["left_out"] == {"endless": "not done after 1 s"}


class Fake:
    """In place of a contender: a step takes `seconds`; the call of `steps` after the first `calls`
    fails."""

    def __init__(self, seconds: float = 1.0, calls: int = 100, error: Exception | None = None):
        self.seconds, self.calls, self.error, self.called = seconds, calls, error, []

    def steps(self, count: int) -> float:
        self.called.append("steps")
        self.calls -= 1
        if self.calls < 0:
            raise self.error or RuntimeError("CUDA error: an illegal memory access\nmore | lines")
        return self.seconds * count

    def turn(self, count: int) -> tuple[float, int]:
        return self.steps(count), 77

    def rest(self) -> None:
        pass

    def shares(self) -> dict[str, float]:
        assert self.calls >= 0  # one that has failed may be gone
        self.called.append("shares")
        return {"data": 0.25, "forward_backward": 0.5, "other": 0.25}


FAKE_WAYS = {
    "plain loop": Way(False, "fp32"),
    "compile": Way(False, "torch.compile", compiled=True),
    "compile, graphs": Way(False, "reduce-overhead", compiled=True, graphs=True),
    "ours": Way(True, "bf16"),
    "ours, graphs": Way(True, "graphs", graphs=True),
}
READY = 3  # calls of `steps` before the turns


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """(fakes by name) -> what `compare` finds in two turns of theirs."""
    monkeypatch.setattr(compare, "kept_by", lambda case, way, device: 1e6)
    case = Case("a case", None, 4, Rule("sgd", 0.1, 0.0), None, None, None, None)

    def run(fakes: dict[str, Fake]) -> dict:
        ways = {name: FAKE_WAYS[name] for name in fakes}
        by_way = {ways[name]: fake for name, fake in fakes.items()}
        monkeypatch.setattr(compare, "contender", lambda case, way, *others: by_way[way])
        options = options_of(tmp_path / "x.json")
        return compare.compare(case, ways, TINY, options, Budget(9 * PATIENCE), tmp_path)

    return run


def test_one_that_fails_in_a_turn_costs_no_other_its_figures(compared):
    found = compared({
        "plain loop": Fake(), "compile": Fake(calls=READY), "ours": Fake(0.5, calls=READY + 1),
        "ours, graphs": Fake(0.25),
    })  # fmt: skip
    reason = "RuntimeError: CUDA error: an illegal memory access"
    assert found["left_out"] == {"compile": reason, "ours": reason}
    turns = {name: len(values) for name, values in found["samples_per_second"].items()}
    assert turns == {"plain loop": 2, "ours": 1, "ours, graphs": 2}
    assert found["ratios"]["ours / plain loop"]["median"] == pytest.approx(2)
    text = "\n".join(performance_page.table(found))
    assert f"| compile | torch.compile | left out: {reason} |" in text
    assert f"| ours | bf16; then {reason} | 8 | 2.00 (2.00 to 2.00) |" in text


def test_without_the_plain_loop_there_are_the_others(compared, tmp_path):
    """Which failed without a word."""
    found = compared({"plain loop": Fake(calls=0, error=MemoryError()), "ours": Fake()})
    assert found["left_out"] == {"plain loop": "MemoryError"} and found["ratios"] == {}
    result = {"machine": {"device": "cpu"}, "cases": {"a case": found}, "race": None}
    assert "| ours | bf16 | 4 |  | 1.0 s | 1.00 MB |" in performance_page.tables(result)
    performance_page.draw(result, tmp_path / "plot.png")


def test_ours_are_set_against_the_best_compiled_loop(compared):
    found = compared({
        "plain loop": Fake(), "compile": Fake(0.5), "compile, graphs": Fake(0.25),
        "ours": Fake(0.2),
    })  # fmt: skip
    assert found["best_compile"] == "compile, graphs"
    assert found["ratios"]["ours / best torch.compile"]["median"] == pytest.approx(1.25)
    said = 'Over the best torch.compile, which is "compile, graphs": ours: 1.25 (1.25 to 1.25).'
    assert performance_page.table(found)[-1] == said


def test_a_graph_has_no_peak(compared):
    found = compared({"plain loop": Fake(), "ours": Fake(), "ours, graphs": Fake()})
    assert found["peak_bytes"] == {"plain loop": 77, "ours": 77, "ours, graphs": None}


def test_shares_are_those_of_the_turns(compared):
    """They are asked for once before, which forgets what was there."""
    fake = Fake()
    compared({"plain loop": fake})
    assert fake.called == [*["steps"] * 3, "shares", *["steps"] * 2, "shares"]


def test_a_case_that_fails_leaves_the_other(monkeypatch, tmp_path, capsys):
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


def test_reasons():
    left_out = {}
    with attempt("late", 0.05, left_out):
        time.sleep(PATIENCE)
    with attempt("never", -1, left_out):
        time.sleep(PATIENCE)
    with attempt("well", PATIENCE, left_out):
        pass
    assert left_out == {"late": "not done after 0 s", "never": "no time was left"}
    assert in_a_line(ValueError("a | b\nc")) == "ValueError: a / b"


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


@pytest.mark.slow
def test_the_course_on_a_gpu_rehearsed(tmp_path, monkeypatch):
    """Its contenders, but what torch.compile makes, which takes minutes on a CPU. The one by graphs
    is left out, for there is no GPU, and costs the others nothing."""
    real = speed.ways_of
    monkeypatch.setattr(
        speed, "ways_of", lambda kind, precision, cuda, compiled: real(kind, precision, True, False)
    )
    cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    there = SimpleNamespace(cuda=cuda, device=lambda *_: torch.device("cpu"))
    monkeypatch.setattr(gpu, "torch", there)
    monkeypatch.setattr(compare, "InAChild", InThisProcess)
    monkeypatch.setattr(gpu, "SIZES", dataclasses.replace(TINY, race=gpu.SIZES.race))
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path), "--workers", "0", "--repetitions", "2"]) == 0
    cases = json.loads(path.read_text())["cases"]
    texts, pictures = sorted(cases.values(), key=lambda case: len(case["ways"]))
    assert not texts["left_out"]
    assert set(pictures["left_out"]) == {"ours, speed, graphs"}
    for case in (texts, pictures):
        done = set(case["ways"]) - set(case["left_out"])
        assert {"plain loop", "autocast", "ours", "ours, memory", "ours, speed"} == done
        assert all(len(case["samples_per_second"][name]) == 2 for name in done)


def test_a_gpu_of_80_gb_is_large_enough():
    """For the contender that keeps the most, in fp32, beside the graphs of two others in bf16; with
    a fifth besides for what convolutions work in, and a gigabyte for each process."""
    model = ResNet(gpu.SIZES.depth, 10)
    kept = bytes_of_a_sample(model, lambda n: model(torch.randn(n, 3, 32, 32)))
    ways = speed.ways_of("pictures", "bf16", cuda=True, compiled=True)
    graphs = sum(way.graphs for way in ways.values())
    step = 1.2 * kept * gpu.SIZES.picture_batch
    assert graphs == 2 and step + graphs * step / 2 + len(ways) * 1e9 < 80e9


def test_between_turns_a_gpu_is_left_to_others(monkeypatch):
    called = []
    for name, answer in {
        "reset_peak_memory_stats": None, "memory_allocated": 5, "max_memory_allocated": 9,
        "empty_cache": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(
            torch.cuda, name, lambda *_, name=name, answer=answer: called.append(name) or answer
        )
    fake = Fake(2.0)
    alone = compare.Alone(fake, torch.device("cuda"))
    assert alone.turn(3) == (6.0, 4) and fake.called == ["steps"] * 2
    assert called[0] == "reset_peak_memory_stats" and "empty_cache" not in called
    alone.rest()
    assert called[-1] == "empty_cache"


@pytest.mark.slow
def test_help_of_a_script():
    """Started as a file, from anywhere."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), "--help"], cwd=ROOT.parent,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "make bench" in done.stdout


def test_help_of_the_page():
    assert performance_page.main(["--help"]) == 0


def test_what_a_process_takes():
    for key in ("narrow", "transformer"):
        case = host_memory.CASES[key]._replace(batch=2)
        found = host_memory.train(case, "memory", steps=1, threads=1)
        assert len(found["seconds"]) == 1
        # Nothing, where this process had more before.
        assert 0 <= found["gb_after_two"] <= found["gb_after_all"] < 8
