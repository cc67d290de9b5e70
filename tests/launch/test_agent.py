"""What torchrun's agent tells of failures, and that torchrun still logs what it reads."""

import ast
import inspect
import logging
import socket
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.multiprocessing import api as processes

from utils.launch import agent


@pytest.fixture(autouse=True)
def without_launch_folder(monkeypatch):
    monkeypatch.delenv("LAUNCH_FOLDER", raising=False)


def failure(code: int, second: int, pid: int = 0) -> SimpleNamespace:
    return SimpleNamespace(exitcode=code, timestamp=second, pid=pid)


@pytest.mark.parametrize(
    ("failures", "rank", "code"),
    [
        ({0: failure(3, 8), 1: failure(4, 7), 2: failure(5, 9)}, 1, 4),
        ({0: failure(3, 7), 1: failure(-9, 7)}, 1, 137),  # killed: not because of another rank
        ({0: failure(-15, 6), 1: failure(-9, 5, pid=11), 2: failure(3, 7)}, 2, 3),  # by the agent
    ],
)
def test_the_rank_that_failed_first_is_to_blame(capsys, failures, rank, code):
    events = agent._Events(restarts=0, of_many=False)
    events.killed.add(11)
    assert agent._first_failure(failures, events, "go on") == code
    assert capsys.readouterr().err.startswith(f"error: rank {rank} on {socket.gethostname()} ")


def logged(module, start: str) -> list[logging.LogRecord]:
    """What a module of torchrun logs, if it begins so. Its arguments are not values but, as text,
    the expressions that give them."""
    records = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                args=[ast.Constant(value=str(text)), *arguments],
            ) if text.startswith(start):
                number, values = getattr(logging, level.upper()), tuple(map(ast.unparse, arguments))
                record = logging.LogRecord(module.__name__, number, "", 0, text, values, None)
                records.append(record)
    return records


def test_torchrun_logs_what_the_agent_reads(monkeypatch, capsys):
    """In other words, or with other arguments, a new torchrun would silently not be understood."""
    killed = []
    monkeypatch.setattr(agent, "kill_groups", killed.extend)
    monkeypatch.setattr(agent, "ended_how", lambda code: f"ended with {code}")
    events = agent._Events(restarts=9, of_many=False)

    def read(module, start: str) -> None:
        records = logged(module, start)
        assert records, f"nothing begins with {start!r} in {module.__name__}"
        assert module.logger.name.startswith("torch.distributed.")
        # The agent lets one module log from INFO on, see _quiet_torchrun; WARNING is the default.
        lowest = logging.INFO if module is server else logging.WARNING
        assert all(record.levelno >= lowest for record in records)
        for record in records:
            events.emit(record)

    read(server, "Received %s death signal")
    assert events.may_save
    read(server, "[%s] Starting worker group")
    assert not events.may_save
    read(processes, "Sending process %s closing signal %s")
    assert set(killed) == events.killed == {"handler.proc.pid"}
    assert not capsys.readouterr().err
    read(processes, "failed (exitcode: %s) local_rank: %s (pid: %s) of binary")
    host = socket.gethostname()
    assert capsys.readouterr().err.startswith(
        f"note: process first_failure.local_rank of {host} ended with first_failure.exitcode; "
    )
    read(server, "[%s] Detected %s new nodes from group_rank=%s")
    assert events.may_save and "a node has joined" in capsys.readouterr().err
