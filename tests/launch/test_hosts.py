"""HOSTFILE: nodes that are started by ssh, for which a script on PATH stands in."""

import contextlib
import io
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from launch.script_runs import ENTRY, Launches, alive
from patience import PATIENCE, wait_until
from quick_runs import handlers_put_back

from utils.errors import UserError
from utils.launch import launcher
from utils.launch.hosts import (
    FOLLOW_STDIN,
    Host,
    _print_lines,
    node_commands,
    read_hosts,
    run_nodes,
)

TWO = [Host("node1", 8), Host("me@node2", 8)]


def hosts_of(folder: Path, text: str) -> list[Host]:
    (folder / "hosts").write_text(text)
    return read_hosts(folder / "hosts")


def test_the_nodes_of_a_file(tmp_path):
    text = "# ours\n\nnode1 slots=8\n  10.0.0.2   slots=4  # half of it\nme@node-3.here\n"
    assert hosts_of(tmp_path, text) == [
        Host("node1", 8), Host("10.0.0.2", 4), Host("me@node-3.here", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=8\nnode2:8 slots=two\n", "line 2 must look like: node1 slots=8"),
        ("node1 slots=0\n", "line 1 must look like"),
        ("-oProxyCommand=x slots=1\n", "line 1 must look like"),
        ("node1 slots=8\nnode1 slots=8\n", "node1 is listed twice"),
        ("# nothing\n", "it lists no nodes"),
    ],
)
def test_a_line_that_is_not_a_node_is_refused(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        hosts_of(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        read_hosts(tmp_path / "nothing")


def words_of(command: list[str]) -> tuple[str, dict, list[str]]:
    """(folder, environment, the words that are run) of a command as sshd's shell reads it."""
    words = shlex.split(command[-1])
    assert words[0] == "cd" and words[2:5] == ["&&", "exec", "env"]
    start = words.index("bash")
    return words[1], dict(word.split("=", 1) for word in words[5:start]), words[start:]


def test_the_commands_of_the_nodes():
    environ = {"NCCL_DEBUG": "a b", "WANDB_API_KEY": "x", "HOME": "/me", "MAX_RESTARTS": "0"}
    argv = ["x_test.py", "--output", "a 'run' $HOME"]
    commands = node_commands(TWO, ["bash", "/a b/run_distributed.sh"], argv, environ, "/the folder")
    assert [command[:3] for command in commands] == [["ssh", "-o", "BatchMode=yes"]] * 2
    assert [command[-2] for command in commands] == ["node1", "me@node2"]
    for rank, command in enumerate(commands):
        folder, variables, words = words_of(command)
        assert folder == "/the folder" and words[1:] == ["/a b/run_distributed.sh", *argv]
        endpoint = variables.pop("RDZV_ENDPOINT")
        assert endpoint.startswith("node1:2") or endpoint.startswith("node1:3")
        assert variables == {
            "NCCL_DEBUG": "a b", "MAX_RESTARTS": "0", "PYTHON": sys.executable, FOLLOW_STDIN: "1",
            "NNODES": "2", "NODE_RANK": str(rank), "NPROC": "8",
        }  # fmt: skip
    (command,) = node_commands([Host("node1", None)], ["bash", "x"], [], {"NPROC": "3"}, "/")
    assert words_of(command)[1] == {"PYTHON": sys.executable, FOLLOW_STDIN: "1", "NPROC": "3"}
    command = node_commands(TWO, ["bash", "x"], [], {"RDZV_ENDPOINT": "ib1:1"}, "/")[1]
    assert words_of(command)[1]["RDZV_ENDPOINT"] == "ib1:1"


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "NPROC"])
def test_variables_that_contradict_the_file_are_refused(name):
    with pytest.raises(UserError, match=f"{name}=3: "):
        node_commands(TWO, ["bash", "x"], [], {name: "3"}, "/")


WAITS = "read n; exit $((128 + n))"  # as a node's launcher takes a signal


@pytest.mark.parametrize(
    ("scripts", "code", "line"),
    [
        (["true", "true"], 0, ""),
        (["exit 7", WAITS], 7, "error: node1 ended with exit code 7, and the other nodes are"),
        ([WAITS, "echo why >&2; kill -9 $$"], 137, "me@node2: why\nerror: me@node2 was killed by"),
        ([WAITS, "exit 255"], 1, "error: ssh cannot start anything on me@node2"),
        (["kill -INT $PPID; " + WAITS, WAITS], 130, ""),
        (["kill -TERM $PPID; " + WAITS, WAITS], 143, ""),
    ],
)
def test_all_nodes_end_together(scripts, code, line, capsys):
    with handlers_put_back():
        assert run_nodes(TWO, [["bash", "-c", script] for script in scripts], "go on") == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == (line.count("\n") + 1 if line else 0)
    if "ssh" in line:
        assert "`ssh -o BatchMode=yes me@node2 true`" in err and "ssh-copy-id me@node2" in err


def test_a_node_is_read_to_the_end_though_nobody_reads_the_launcher():
    """Its own pipe would fill up, and the training wait for ever."""
    read, write = os.pipe()
    os.close(read)
    for stream in (None, open(write, "w")):  # noqa: SIM115
        source = io.BytesIO(b"one\ntwo\n")
        _print_lines(source, stream, "node2: ")
        assert source.read() == b""
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_nodes_letters_that_the_locale_lacks_are_replaced():
    printed = io.BytesIO()
    stream = io.TextIOWrapper(printed, encoding="ascii")
    _print_lines(io.BytesIO("Größe\nlast".encode()), stream, "node2: ")
    assert printed.getvalue() == b"node2: Gr\\xf6\\xdfe\nnode2: last\n"


def test_mistakes_are_told_before_any_node_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOSTFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    for argv, line in (
        (["--widht", "3"], "error: unknown flag --widht"),
        (["--dataset", "shapes"], "error: several nodes need --output FOLDER"),
        (["--dataset", "shapes", "--output", "x"], "error: HOSTFILE needs ssh, which"),
    ):
        with handlers_put_back():
            assert launcher.main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith(line) and err.count("\n") == 1


# ---- with a stand-in for ssh --------------------------------------------------------------------

STAND_IN = """#!/usr/bin/env bash
# Takes ssh's options and a node's name, and runs the command here, in an environment of its own.
while [ "$1" = -o ]; do shift 2; done
shift
exec env -i PATH="$PATH" HOME="$HOME" NOTES="$NOTES" TMPDIR="$TMPDIR" CUDA_VISIBLE_DEVICES= \\
    bash -c "$*"
"""


@pytest.fixture
def nodes(tmp_path):
    """start(*arguments) starts ENTRY on two nodes, which are both this machine."""
    launches = Launches(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(STAND_IN)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def start(*arguments):
        return launches.start(
            ENTRY, *arguments, HOSTFILE="hosts", PATH=path, NPROC="", MAX_RESTARTS="0",
            JOIN_TIMEOUT=str(PATIENCE),
        )  # fmt: skip

    launches.start_on_nodes = start
    yield launches
    for launch in launches.started:
        launch.kill()
        launch.communicate()
    for start_of_worker in launches.starts():
        if alive(start_of_worker["pid"]):
            os.kill(start_of_worker["pid"], signal.SIGKILL)


def met(nodes) -> list[str]:
    path = nodes.folder / "notes" / "met"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_two_nodes_train_together_and_stop_together(nodes):
    launch = nodes.start_on_nodes("--do", "meet", "--output", "my 'run' $HOME")
    wait_until(lambda: met(nodes) == ["3 2", "3 2"])
    launch.send_signal(signal.SIGTERM)
    out, err = launch.communicate(timeout=PATIENCE)
    assert (launch.returncode, err) == (143, "")
    assert out.startswith("nodes by ssh: 127.0.0.1, localhost\n")
    assert out.count("\nlocalhost: torchrun ") == out.count("\ntorchrun ") == 1
    assert all("my 'run' $HOME" in start["argv"] for start in nodes.starts())
    assert nodes.nothing_left()


@pytest.mark.slow
def test_a_failure_on_one_node_ends_both(nodes):
    launch = nodes.start_on_nodes("--do", "fail", "--output", "run")
    _, err = launch.communicate(timeout=PATIENCE)
    assert launch.returncode in (1, 7)  # the other node may be first to say that all is over
    assert "what went wrong" in err and "HOSTFILE=hosts bash run_distributed.sh" in err
    assert nodes.nothing_left()


@pytest.mark.slow
def test_nodes_end_when_what_has_started_them_is_killed(nodes):
    launch = nodes.start_on_nodes("--do", "train", "--output", "run")
    wait_until(lambda: len(nodes.starts()) == 2)
    launch.kill()
    wait_until(lambda: not any(alive(start["pid"]) for start in nodes.starts()))
    wait_until(nodes.nothing_left)
    assert sorted((nodes.folder / "notes" / "saved").read_text().split()) == ["0", "1"]
