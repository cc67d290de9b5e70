"""With how many CPU threads a run computes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from utils.runs.run import Run


@pytest.mark.parametrize(("flag", "variable", "cores", "threads", "set_to"), [
    (None, None, 2, 2, [2]),
    (None, None, 8, 8, []),  # without a quota PyTorch keeps its own settings
    (3, None, 2, 3, [3]),
    (None, "8", 2, 8, []),
], ids=["quota", "no quota", "flag", "variable"])  # fmt: skip
def test_a_cpu_quota_lowers_the_number_of_threads_unless_it_is_chosen(
    monkeypatch, flag, variable, cores, threads, set_to
):
    called = []
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: [8, *called][-1])
    monkeypatch.setattr("utils.machine.cores.usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    settings = SimpleNamespace(
        device="cpu", engine="torch", action=SimpleNamespace(trains=True), infers_by_ort=False,
        keep_freed_memory=False, threads=flag, deterministic=False, compile=True, seed=0,
        precision="fp32",
    )  # fmt: skip
    signals = SimpleNamespace(held=contextlib.nullcontext)
    origin = {"precision": "default"}
    run = SimpleNamespace(settings=settings, origin=origin, signals=signals, place=None)
    Run._set_up_device(run)
    assert (run.threads, called) == (threads, set_to)
