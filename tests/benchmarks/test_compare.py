"""Contenders side by side: turns, ratios, and what is left out with its reason."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE
from small_comparisons import TINY, Fake, InThisProcess, options_of

from benchmarks import compare, speed, speed_page
from benchmarks.budget import Budget
from benchmarks.cases import Case, text_case
from benchmarks.contenders import Rule, Way


def test_what_cannot_run_is_left_out(tmp_path, monkeypatch):
    """In this process; test_child.py has failures in a process of its own."""
    monkeypatch.setattr(compare, "LEAST_SECONDS", PATIENCE)
    monkeypatch.setattr(compare, "ChildContender", InThisProcess)
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


def test_nothing_is_started_without_memory_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "available_memory", lambda: 3.9e9)
    case = text_case(TINY, torch.device("cpu"), 0)
    options = options_of(tmp_path / "x.json")
    found = compare.compare(
        case, {"plain loop": Way(False, "")}, TINY, options, Budget(60), tmp_path
    )
    assert found["left_out"] == {"plain loop": "MemoryError: less than 4 GB of memory are left"}


def test_our_contenders_are_set_up_as_by_the_entry_scripts(tmp_path, monkeypatch):
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


def test_a_contender_that_is_not_ready_in_time_is_left_out(tmp_path, monkeypatch):
    """Even if it swallows exceptions, as torch.compile does."""

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
    budget = SimpleNamespace(left=1.0 + turns)  # does not run down
    found = compare.compare(case, ways, TINY, options, budget, tmp_path)
    assert found["left_out"] == {"endless": "not done after 1 s"}


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
    """(fakes by name) -> the result of `compare` after two turns of each."""
    monkeypatch.setattr(compare, "kept_by", lambda case, way, device: 1e6)
    case = Case("a case", None, 4, Rule("sgd", 0.1, 0.0), None, None, None, None)

    def run(fakes: dict[str, Fake]) -> dict:
        ways = {name: FAKE_WAYS[name] for name in fakes}
        by_way = {ways[name]: fake for name, fake in fakes.items()}
        monkeypatch.setattr(compare, "contender", lambda case, way, *others: by_way[way])
        options = options_of(tmp_path / "x.json")
        return compare.compare(case, ways, TINY, options, Budget(9 * PATIENCE), tmp_path)

    return run


def test_a_failure_in_a_turn_leaves_the_figures_of_the_others(compared):
    found = compared({
        "plain loop": Fake(), "compile": Fake(calls=READY), "ours": Fake(0.5, calls=READY + 1),
        "ours, graphs": Fake(0.25),
    })  # fmt: skip
    reason = "RuntimeError: CUDA error: an illegal memory access"
    assert found["left_out"] == {"compile": reason, "ours": reason}
    turns = {name: len(values) for name, values in found["samples_per_second"].items()}
    assert turns == {"plain loop": 2, "ours": 1, "ours, graphs": 2}
    assert found["ratios"]["ours / plain loop"]["median"] == pytest.approx(2)
    text = "\n".join(speed_page.table(found))
    assert f"| compile | torch.compile | left out: {reason} |" in text
    assert f"| ours | bf16; then {reason} | 8 | 2.00 (2.00 to 2.00) |" in text


def test_the_others_are_reported_without_the_plain_loop(compared, tmp_path):
    """Whose exception had no message."""
    found = compared({"plain loop": Fake(calls=0, error=MemoryError()), "ours": Fake()})
    assert found["left_out"] == {"plain loop": "MemoryError"} and found["ratios"] == {}
    result = {"machine": {"device": "cpu"}, "cases": {"a case": found}, "race": None}
    assert "| ours | bf16 | 4 |  | 1.0 s | 1.00 MB |" in speed_page.tables(result)
    speed_page.draw(result, tmp_path / "plot.png")


def test_ours_are_compared_with_the_best_compiled_loop(compared):
    found = compared({
        "plain loop": Fake(), "compile": Fake(0.5), "compile, graphs": Fake(0.25),
        "ours": Fake(0.2),
    })  # fmt: skip
    assert found["best_compile"] == "compile, graphs"
    assert found["ratios"]["ours / best torch.compile"]["median"] == pytest.approx(1.25)
    said = 'Over the best torch.compile, which is "compile, graphs": ours: 1.25 (1.25 to 1.25).'
    assert speed_page.table(found)[-1] == said


def test_no_peak_memory_is_reported_of_graphs(compared):
    found = compared({"plain loop": Fake(), "ours": Fake(), "ours, graphs": Fake()})
    assert found["peak_bytes"] == {"plain loop": 77, "ours": 77, "ours, graphs": None}


def test_time_fractions_are_those_of_the_turns(compared):
    """They are read once before the turns, which resets them."""
    fake = Fake()
    compared({"plain loop": fake})
    assert fake.called == [*["steps"] * 3, "shares", *["steps"] * 2, "shares"]


def test_a_contender_frees_gpu_memory_between_turns(monkeypatch):
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
