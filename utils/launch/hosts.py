"""Starts run_distributed.sh by ssh on each node of HOSTFILE, and ends all of them together.

A node's launcher reads its standard input (`follow_stdin`), which ssh carries: a number is a signal
to take; its end, when this process or the connection is gone, counts as SIGTERM.
"""

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..reporting.console import print_line
from .agent import ended_how, kill_groups, say
from .plan import FIRST_PORT, PORTS, VARIABLES
from .signals import stopping_signals

FOLLOW_STDIN = "LAUNCH_FOLLOWS_STDIN"  # set for the launcher of a node
# BatchMode: ssh fails where it would ask for a password. ServerAlive: it notices a lost node.
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15"]
NO_CONNECTION = 255  # ssh's own exit code
END_SECONDS = 60  # for nodes to end after a signal; torchrun gives their processes 30
# What else the nodes get of this machine's environment. No secrets: command lines can be read.
PASSED = ("NCCL_", "GLOO_", "TORCH", "CUDA_", "PYTHON", "MKL_", "KMP_", "GOMP_", "UCX_", "FI_",
          "WANDB_", "HF_", "LD_LIBRARY_PATH", "LOGLEVEL")  # fmt: skip
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Host:
    """A node: the name that ssh takes, and its number of processes; None: one for each GPU."""

    name: str
    slots: int | None


def read_hosts(path: Path) -> list[Host]:
    """The nodes of a file with lines such as `node1 slots=8`; # begins a comment.

    Raises:
        UserError: the file cannot be read, or a line says something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"HOSTFILE={path}: {getattr(error, 'strerror', error)}") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([\w.@][\w.@:-]*)(?:\s+slots=([1-9]\d*))?", words, re.ASCII)
        if match is None:
            raise UserError(f"HOSTFILE={path}: line {number} must look like: node1 slots=8")
        if match[1] in [host.name for host in hosts]:
            raise UserError(
                f"HOSTFILE={path}: {match[1]} is listed twice; slots= sets its number of processes"
            )
        hosts.append(Host(match[1], int(match[2]) if match[2] else None))
    if not hosts:
        raise UserError(
            f"HOSTFILE={path}: it lists no nodes; write one on each line, such as: node1 slots=8"
        )
    return hosts


def node_commands(
    hosts: list[Host], launcher: list[str], argv: list[str], environ: Mapping[str, str], folder: str
) -> list[list[str]]:
    """The ssh command of each node.

    Args:
        launcher: the command that starts it, the same on all nodes; `argv`: its arguments.

    Raises:
        UserError: a variable contradicts the file.
    """
    for name in ("NNODES", "NODE_RANK"):
        if environ.get(name):
            raise UserError(f"{name}={environ[name]}: HOSTFILE says how many nodes there are")
    if environ.get("NPROC") and any(host.slots for host in hosts):
        raise UserError(
            f"NPROC={environ['NPROC']}: slots= in HOSTFILE sets the number of processes, too; "
            "leave one of the two out"
        )
    shared = {
        name: value
        for name, value in environ.items()
        if value and (name in VARIABLES or name.startswith(PASSED))
        if not any(word in name for word in SECRET)
    }
    shared |= {"PYTHON": sys.executable, FOLLOW_STDIN: "1"}
    if len(hosts) > 1:
        first = hosts[0].name.rpartition("@")[2]
        # Another port for another run that is started here meanwhile.
        shared.setdefault("RDZV_ENDPOINT", f"{first}:{FIRST_PORT + os.getpid() % PORTS}")
        shared["NNODES"] = str(len(hosts))
    commands = []
    for rank, host in enumerate(hosts):
        own = dict(shared)
        if len(hosts) > 1:
            own["NODE_RANK"] = str(rank)
        if host.slots:
            own["NPROC"] = str(host.slots)
        words = ["env", *(f"{name}={value}" for name, value in sorted(own.items()))]
        words += [*launcher, *argv]
        command = f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"
        commands.append([*SSH, host.name, command])
    return commands


def run_nodes(hosts: list[Host], commands: list[list[str]], go_on: str) -> int:
    """Runs the commands until all nodes have ended, and stops the others when one fails;
    `stopping_signals` are passed on. Returns the exit code: that of the node that failed first, 1
    if it cannot be reached, 128 + n after signal n.

    The first node's lines are printed as they are, those of others with the node's name.

    Args:
        go_on: tells the user how to continue after a failure.
    """
    events: queue.SimpleQueue = queue.SimpleQueue()
    for signum in stopping_signals():
        signal.signal(signum, lambda signum, frame: events.put((None, signum)))
    # A session of its own: Ctrl-C does not reach ssh, which would cut the connection.
    pipes: dict = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    nodes = [subprocess.Popen(c, start_new_session=True, **pipes) for c in commands]
    for number, node in enumerate(nodes):
        name = f"{hosts[number].name}: " if number else ""
        pumps = [
            threading.Thread(target=_print_lines, args=(source, to, name), daemon=True)
            for source, to in ((node.stdout, sys.stdout), (node.stderr, sys.stderr))
        ]
        threading.Thread(target=_wait, args=(number, node, pumps, events), daemon=True).start()
    running, code = set(range(len(nodes))), 0
    while running:
        try:
            number, value = events.get(timeout=END_SECONDS if code else None)
        except queue.Empty:
            say(f"{', '.join(hosts[n].name for n in running)}: no end after {END_SECONDS} s")
            kill_groups([nodes[n].pid for n in running])
            continue
        if number is not None:
            running.discard(number)
            if value == 0 or code:
                continue
            code = 1 if value == NO_CONNECTION else value if value > 0 else 128 - value
            say(_why(hosts[number].name, value, go_on))
            _send(signal.SIGTERM, [nodes[n] for n in running])
        elif code:
            kill_groups([nodes[n].pid for n in running])  # a second signal
        else:
            code = 128 + value
            _send(value, [nodes[n] for n in running])
    return code


def _why(name: str, code: int, go_on: str) -> str:
    if code != NO_CONNECTION:
        return f"{name} {ended_how(code)}, and the other nodes are stopped; {go_on}"
    return (
        f"ssh cannot start anything on {name} (its line is above): `{shlex.join([*SSH[:3], name])} "
        "true` has to work without a question; ssh-keygen makes a key, ssh-copy-id "
        f"{name} installs it there, and one `ssh {name}` by hand accepts the host's key"
    )


def _send(signum: int, nodes: list[subprocess.Popen]) -> None:
    for node in nodes:
        assert node.stdin is not None
        with contextlib.suppress(OSError):  # it has just ended
            node.stdin.write(b"%d\n" % signum)
            node.stdin.flush()


def _wait(number: int, node: subprocess.Popen, pumps: list, events: queue.SimpleQueue) -> None:
    for pump in pumps:
        pump.start()
    code = node.wait()
    for pump in pumps:
        pump.join(5)  # a process that the node has left behind may hold the pipe
    events.put((number, code))


def _print_lines(source, to, name: str) -> None:
    """Reads to the end, whether or not anybody reads the lines here: a node whose pipe is full
    would wait for ever."""
    for line in source:
        print_line(name + line.decode(errors="replace").rstrip("\n"), to)


def follow_stdin() -> None:
    """Takes the signals that come by standard input, in a thread. Processes that are started from
    now on have an empty one."""
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    main = threading.main_thread().ident
    assert main is not None

    def follow() -> None:
        text = b"0"
        while text:
            text = os.read(source, 100)
            for signum in text.split() if text else [signal.SIGTERM]:
                signal.pthread_kill(main, int(signum))

    threading.Thread(target=follow, daemon=True).start()
