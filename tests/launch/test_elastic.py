"""What the launcher asks of a run that nodes may join, and what it says when one leaves."""

import logging
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.errors import UserError
from utils.launch import agent, launcher
from utils.launch.launcher import Job
from utils.launch.plan import Plan

ENTRY = Path(__file__).with_name("entry_for_launch.py")
NODES = {"NNODES": "1:3", "RDZV_ENDPOINT": "node1:29400", "NODE_RANK": "1", "NPROC": "2"}
NEEDED = re.escape("NNODES=1:3 with --strategy local needs --local_workers 6 or more: one for each")
LOCAL = ["--strategy", "local"]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """(flags, environment) -> what is started with this output folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_gpus", lambda device: 0)
    return lambda flags, environ=NODES: launcher.prepare(
        [str(ENTRY), "--output", "run", *flags], environ
    )


@pytest.mark.parametrize(
    "flags", [LOCAL, [*LOCAL, "--local_workers", "5"], ["--config", "recipe.yaml"]]
)
def test_a_run_with_local_steps_has_a_worker_for_each_process_that_may_join(
    prepare, tmp_path, flags
):
    (tmp_path / "recipe.yaml").write_text("strategy: local\nlocal_workers: 4\n")
    with pytest.raises(UserError, match=NEEDED):
        prepare(flags)
    prepare([*flags, "--local_workers", "6"])


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ([], NODES),
        ([*LOCAL, "--check"], NODES),
        (LOCAL, NODES | {"NNODES": "3"}),
        (LOCAL, {"NPROC": "2"}),
    ],
)
def test_other_runs_need_no_number_of_workers(prepare, flags, environ):
    prepare(flags, environ)


@pytest.mark.parametrize("resume", [[], ["--resume", "run"]])
def test_the_workers_of_a_run_that_goes_on_are_counted(prepare, tmp_path, resume):
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("# entry_for_launch.py\nstrategy: local\nlocal_workers: 6\n")
    prepare([*LOCAL, *resume])
    config.write_text("# entry_for_launch.py\nstrategy: local\nlocal_workers: 5\n")
    with pytest.raises(UserError, match=NEEDED):
        prepare([*LOCAL, *resume])


def test_without_gpus_those_of_a_slurm_node_are_not_counted(prepare):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4"}
    assert prepare([], slurm)[1].processes == 4
    assert prepare(["--device", "cpu"], slurm)[1].processes == 1
    assert prepare(["--device", "cpu"], slurm | {"NPROC": "2"})[1].processes == 2


# ---- a node that leaves -------------------------------------------------------------------------

LEAVING = "ended with exit code 143: another node is leaving, or one process has got a signal"


@pytest.fixture(autouse=True)
def without_launch_folder(monkeypatch):
    monkeypatch.delenv("LAUNCH_FOLDER", raising=False)


def failed(events: agent._Events, code: int) -> None:
    """What torchrun logs."""
    text = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    events.emit(logging.LogRecord("", logging.ERROR, "", 0, text, (code, 0, 99, "python"), None))


@pytest.mark.parametrize(
    ("of_many", "code", "told"),
    [
        (True, 143, LEAVING),
        (True, 1, "ended with exit code 1"),
        (True, -15, "was killed by SIGTERM"),
        (False, 143, "ended with exit code 143"),
    ],
)
def test_workers_that_stop_with_those_of_another_node_are_told_so(capsys, of_many, code, told):
    events = agent._Events(1, of_many)
    failed(events, code)
    start = f"process 0 of {socket.gethostname()} {told}; all are started again (1 of 1 times)"
    assert capsys.readouterr().err == f"note: {start}\n"
    failures = {0: SimpleNamespace(pid=99, exitcode=code, timestamp=0)}
    assert agent._first_failure(failures, events, "go on") == (code if code > 0 else 128 - code)
    line = f"rank 0 on {socket.gethostname()} {told} (its lines are above); go on"
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("least", "how"),
    [
        (1, "go on with the same command, on 1 node or more with that of RDZV_ENDPOINT among them"),
        (2, "go on with the same command, on 2 nodes or more with that of RDZV_ENDPOINT among"),
        (3, "when all nodes are up again, give the same command on each"),
    ],
)
def test_an_elastic_run_goes_on_without_all_nodes(least, how):
    job = Job(ENTRY, [], "run", folder_is_given=True, resumed=False, device="cpu")
    plan = Plan(1, 1, least, 3, endpoint="node1:29400")
    assert launcher.how_to_go_on(job, plan, ["x_test.py"]).startswith(how)
