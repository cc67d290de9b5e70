"""--check in one process, and the parts of it that need no other."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from quick_runs import handlers_put_back

import resnet50_test
import transformer_test
import vit_test
from utils.check import arithmetic, machine
from utils.check.arithmetic import matrix_speed, slowest
from utils.check.context import (
    FAILS,
    OK,
    Check,
    Report,
    amount,
    part_of_check,
)
from utils.check.ranks import check_versions, folder_problem, show_ranks
from utils.check.run_check import add_findings_of_other_ranks, check_memory
from utils.distributed import collectives
from utils.errors import UserError
from utils.exchange import Exchange
from utils.machine import packages
from utils.reporting.console import aligned
from utils.settings.config import parse

# ---- the report ---------------------------------------------------------------------------------


def test_the_report_lists_what_fails_and_is_written_as_json(tmp_path):
    lines = []
    report = Report(lines.append)
    report.add("clocks", OK, "within 1 ms")
    report.add("versions", FAILS, "torch differs")
    report.facts["ranks"] = [{"speed": float("inf")}]
    assert report.failed == ["versions"]
    assert lines == ["ok          clocks: within 1 ms", "FAILS       versions: torch differs"]
    report.write(tmp_path / "runs" / "check.json")
    content = json.loads((tmp_path / "runs" / "check.json").read_text())
    assert content["result"] == "fails" and content["ranks"] == [{"speed": None}]
    assert [found["verdict"] for found in content["findings"]] == ["ok", "fails"]
    (tmp_path / "file").touch()
    report.write(tmp_path / "file" / "check.json")
    assert "there is no JSON file" in lines[-1]


def test_amounts_and_columns():
    assert amount(450e9, "B/s") == "450 GB/s" and amount(1.5e12, "FLOP/s") == "1.5 TFLOP/s"
    assert [amount(s, "s") for s in (2.0, 0.0013, 2e-5)] == ["2 s", "1.3 ms", "20 us"]
    assert aligned([("a", "bcd"), ("efg", "h")]) == ["a    bcd", "efg  h"]


# ---- this process -------------------------------------------------------------------------------


@pytest.fixture
def check(monkeypatch, tmp_path):
    """check(*flags) -> (exit code, the report)."""
    monkeypatch.chdir(tmp_path)

    def check(*flags) -> tuple[int, dict]:
        with handlers_put_back():
            code = resnet50_test.main(["--check", "--device", "cpu", *map(str, flags)])
        (file,) = (tmp_path / "runs").glob("check-*.json")
        return code, json.loads(file.read_text())

    return check


def test_a_sound_machine(check, capsys, tmp_path):
    code, report = check("--output", "some/where")
    assert (code, report["result"]) == (0, "ok")
    names = [found["name"] for found in report["findings"]]
    assert names == ["memory", "fused modules", "packages", "optional packages", "folder"]
    (own,) = report["ranks"]
    assert own["torch"] == torch.__version__ and own["device"]["type"] == "cpu"
    out = capsys.readouterr().out
    assert "all checks have passed" in out and "host " in out
    assert not (tmp_path / "some" / "where").exists()  # nothing is left behind


def test_what_does_not_hold_ends_with_1(check, monkeypatch, capsys, tmp_path):
    """A wrong fused module, a package that is missing, and a folder that cannot be written to."""
    wrong = arithmetic.fused_cross_entropy
    monkeypatch.setattr(arithmetic, "fused_cross_entropy", lambda *given: wrong(*given) * 1.001)
    missing = packages.Package("beautiful-package", "beautiful_package", "the looks")
    monkeypatch.setattr("utils.check.run_check.NEEDED", (*packages.NEEDED, missing))
    (tmp_path / "file").touch()
    code, report = check("--output", "file/folder")
    assert (code, report["result"]) == (1, "fails")
    out = capsys.readouterr().out
    assert "failed: fused modules, packages, folder" in out
    assert "beautiful-package for the looks: pip install beautiful-package" in out


def test_flags_of_training_have_no_effect(capsys):
    lines = []
    settings, _ = parse(
        resnet50_test.Settings, ["--check", "--epochs", "3", "--output", "x"], "", lines.append
    )
    assert settings.output == "x" and not settings.action.trains
    assert lines == ["note: --epochs has no effect: --check does not train"]
    with pytest.raises(UserError, match="--check and --eval_only: give only one"):
        parse(resnet50_test.Settings, ["--check", "--eval_only"], "")


@pytest.mark.parametrize("entry", [resnet50_test, vit_test, transformer_test])
def test_check_is_a_flag_and_not_what_validates_the_others(entry):
    """A method of this name in a class of settings would never be called: it is `validate`."""
    assert not any(callable(vars(base).get("check")) for base in entry.Settings.__mro__)


def test_the_digest_tells_other_code(tmp_path):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "a.py").write_text("a = 1\n")
    before = machine.code_digest(tmp_path)
    assert before == machine.code_digest(tmp_path)
    (tmp_path / "utils" / "a.py").write_text("a = 2\n")
    assert machine.code_digest(tmp_path) != before


def test_a_folder_of_which_nothing_can_be_known_is_named(tmp_path):
    problem = folder_problem(Exchange(), tmp_path / ("x" * 300), "node0")
    assert problem == "node0 cannot write to it: File name too long"


def test_no_secrets_are_told():
    environ = {"NCCL_ALGO": "Ring", "CUDA_TOKEN": "x", "HOME": "/home", "OMP_NUM_THREADS": "2"}
    assert machine.environment(environ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}


def test_the_speed_of_a_rank_and_the_slowest_one(monkeypatch):
    monkeypatch.setattr("utils.check.arithmetic.SECONDS", 0.01)
    assert matrix_speed(torch.device("cpu")) > 0
    assert slowest([4.0, 1.0, 4.0, 5.0]) == (1, 0.25)
    assert slowest([3.0]) == (0, 1.0)


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_part_that_does_not_end_ends_the_process(capsys, ended):
    told = []
    with part_of_check("a quick part", "nothing"):
        pass
    with part_of_check("all-reduce", "the network", lambda: " (rank 1)", told.append, 0.01):
        while not ended:
            time.sleep(0.01)
    assert ended == [1] and told == ["all-reduce does not end within 0.01 s (rank 1): the network"]
    assert "all-reduce does not end within 0.01 s" in capsys.readouterr().err


def test_a_part_that_fails_ends_the_process(capsys, ended):
    told = []
    with part_of_check("all-reduce", "look at NCCL", before=told.append):
        raise RuntimeError("NCCL error in: x.cpp\nmore")
    assert ended == [1] and told == ["all-reduce fails (NCCL error in: x.cpp): look at NCCL"]
    assert "all-reduce fails" in capsys.readouterr().err
    with pytest.raises(UserError), part_of_check("joining", "nothing"):
        raise UserError("a mistake of the user's keeps its line")


# ---- a GPU, and several hosts, as stand-ins -----------------------------------------------------


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU, of which PyTorch and NVML tell what is here."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="12", major=9, minor=0)
    gpu = SimpleNamespace(read=lambda: {"gpu_use": 3.0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 80 << 30))
    monkeypatch.setattr(machine, "open_gpu", lambda uuid: gpu if uuid == "12" else None)


def test_the_facts_of_a_gpu(one_gpu):
    facts = machine.device_facts(torch.device("cuda", 0))
    assert (facts["name"], facts["capability"]) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert facts["figures"] == {"gpu_use": 3.0}


def test_what_is_computed_on_a_gpu_stays_on_it(monkeypatch):
    """On a fake GPU, which has no values: no tensor is on another device."""
    monkeypatch.setattr("utils.check.arithmetic.SECONDS", 0.01)
    monkeypatch.setattr(collectives, "TOTAL_SECONDS", 0.0)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda *given, **_: None)
    exchange = SimpleNamespace(
        size=2, group=None, barrier=lambda: None, gather_json=lambda value: [value] * 2
    )
    with fake_cuda():
        assert arithmetic.largest_differences(CUDA).keys() == {
            "cross-entropy", "feed-forward block", "BatchNorm"
        }  # fmt: skip
        assert arithmetic.how_computed(CUDA) == "by Triton's kernels"
        assert matrix_speed(CUDA) > 0
        assert collectives.measure(exchange, CUDA, "all-reduce").size == 1 << 28


@pytest.mark.parametrize(
    ("files", "visible", "cuda", "words"),
    [
        ({}, None, "13.0", None),  # there is no GPU
        ({"vendor": "0x8086", "class": "0x030000"}, None, "13.0", None),  # Intel's
        ({"vendor": "0x10de", "class": "0x020000"}, None, "13.0", None),  # a network card
        ({"vendor": "0x10de", "class": "0x030200"}, None, "13.0", "there is no NVIDIA driver"),
        ({"vendor": "0x10de", "class": "0x030200"}, None, None, "built without CUDA"),
        ({"vendor": "0x10de", "class": "0x030200"}, "", "13.0", "CUDA_VISIBLE_DEVICES= hides it"),
        ({"driver": True}, "0,1", "13.0", "driver 535.104.05, PyTorch for CUDA 13.0: too old"),
    ],
)
def test_a_gpu_that_pytorch_cannot_use(files, visible, cuda, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)

    def init() -> None:
        raise RuntimeError("too old.\nUpdate it")

    monkeypatch.setattr(torch.cuda, "init", init)
    if files.pop("driver", False):
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    device = tmp_path / "sys/bus/pci/devices/0000:18:00.0"
    device.mkdir(parents=True)
    for name, content in files.items():
        (device / name).write_text(f"{content}\n")
    found = machine.unusable_gpu(visible, tmp_path)
    assert found is None if words is None else words in found


def test_a_gpu_that_pytorch_uses_is_usable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.unusable_gpu(None) is None


class TwoHosts:
    """The exchange of rank 0 of two; `told` replaces what rank 1 says."""

    rank, size = 0, 2

    def __init__(self):
        self.told = {}

    def gather_json(self, value):
        value = json.loads(json.dumps(value))
        other = value | self.told if isinstance(value, dict) else value
        return [value, other]


def test_two_hosts_are_compared(one_gpu, tmp_path, ended):
    lines, exchange = [], TwoHosts()
    exchange.told = {"host": "node2", "rank": 1, "torch": "2.11.0", "driver": "550.1"}
    watch = SimpleNamespace(silent=lambda: [1])
    run = SimpleNamespace(
        exchange=exchange, device=torch.device("cuda", 0), threads=1, leads=True, watch=watch
    )
    report = Report(lines.append)
    check = Check(run, report, tmp_path / "check.json")
    show_ranks(check)
    check_memory(check)
    check_versions(check)
    text = "\n".join(lines)
    assert re.search(r"node2 +1 +1 x NVIDIA H100 80GB HBM3 +550.1 +2.11.0", text)
    assert "21.5 GB of 85.9 GB free: other processes use this GPU" in text
    assert report.failed == ["versions"] and "2.11.0 on node2; install the same" in text
    assert "driver differs: None on" in text
    report.findings.clear()
    exchange.gather_json = lambda value: [
        value, [{"name": "fused modules", "verdict": FAILS, "text": "off"}]
    ]  # fmt: skip
    add_findings_of_other_ranks(check)
    assert report.findings[0]["text"] == "rank 1 on node2: off"
    with check.part("all-reduce", "the network"):
        raise RuntimeError("connection lost")
    unfinished = json.loads((tmp_path / "check.json").read_text())["findings"][-1]["text"]
    assert ended == [1] and unfinished == (
        "all-reduce fails (connection lost) (no response from rank 1 on node2): the network"
    )
