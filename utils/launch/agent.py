"""Runs torchrun's agent in this process: determines the exit code, condenses what torchrun prints,
and ends the process when the rendezvous stops answering."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from .environment import LAUNCH_FOLDER, previous_exit_code
from .signals import stopping_signals

# In seconds: SILENCE without an answer from the rendezvous kills the workers; the agent then has
# GRACE to end by itself; PROBE lies between two attempts to connect. Together below a minute.
SILENCE, GRACE, PROBE = 25, 15, 3
# Exit codes of workers that have saved and stopped, as a signal or another rank told them to.
STOPPED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def run_agent(arguments: list[str], restarts: int, remote: tuple[str, int] | None, go_on: str):
    """Runs torchrun with these arguments until its workers end; returns the exit code.

    0: all workers have finished. 128 + n: stopped by signal n, which torchrun has passed on to the
    workers. Otherwise the exit code of the worker that failed first (128 + n: killed by signal n),
    or 1 if the other nodes are lost; one line on stderr says which.

    Args:
        restarts: how many failures lead to a restart.
        remote: (host, port) of the rendezvous; None on a single node.
        go_on: tells the user how to continue after a failure.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    def stop(signum, frame):
        raise SignalException("", signal.Signals(signum))

    events = _Events(restarts, of_many=remote is not None)
    _quiet_torchrun(events)
    # torchrun installs its own handlers only when it starts the workers.
    handled = stopping_signals()
    for signum in handled:
        signal.signal(signum, stop)
    if remote is not None:
        threading.Thread(target=_watch, args=(remote, go_on), daemon=True).start()
    try:
        # torchrun would also catch a hang-up that is ignored, and end the workers.
        names = ",".join(each.name for each in handled)
        torchrun.run(torchrun.parse_args([f"--signals-to-handle={names}", *arguments]))
        return 0
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        return _first_failure(error.failures, events, go_on)
    except RendezvousClosedError:
        say(f"the run has ended on another node, whose last lines say why; {go_on}")
    except RendezvousTimeoutError:
        say(f"the other nodes have not joined within JOIN_TIMEOUT; {go_on}")
    except Exception as error:
        signalled = _signal_behind(error)
        if signalled is not None:
            return 128 + signalled.sigval
        if not isinstance(error, (RendezvousError, DistError)):
            raise
        say(f"the rendezvous does not answer: its node is gone, or cannot be reached; {go_on}")
    finally:
        kill_groups(children())
    return 1


def _signal_behind(error: BaseException | None):
    """The SignalException in the chain of exceptions, if any. Where it interrupts torchrun's
    cleanup, that may fail with another error (a `finally` whose variable is not yet assigned)."""
    from torch.distributed.elastic.multiprocessing import SignalException

    while error is not None and not isinstance(error, SignalException):
        error = error.__context__
    return error


def say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def ended_how(code: int) -> str:
    """For a return code as subprocess has it: "ended with exit code 1", "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _first_failure(failures: dict, events: "_Events", go_on: str) -> int:
    """The exit code of the worker that failed first. Prints which one it was, unless that worker
    has printed its error itself.

    Workers that wait for a dead one may fail within the same second; they are not the cause.

    Args:
        failures: {rank: failure} as torchrun reports them.
        events: knows the workers that this agent killed.
    """
    noted = previous_exit_code()
    if noted is not None:
        return noted
    if not failures:
        say(f"a process hangs in the kernel, and torchrun has given up on it; {go_on}")
        return 1
    by_agent = {-signal.SIGTERM, 128 + signal.SIGTERM}
    rank, failure = min(
        failures.items(),
        key=lambda item: (
            item[1].pid in events.killed or item[1].exitcode in by_agent,
            item[1].timestamp,
            item[1].exitcode >= 0,
            item[0],
        ),
    )
    code = failure.exitcode
    ended = events.ended_how(code)
    say(f"rank {rank} on {socket.gethostname()} {ended} (its lines are above); {go_on}")
    return code if code > 0 else 128 - code


# ---- torchrun's log ----------------------------------------------------------------------------


class _Events(logging.Handler):
    """Reads torchrun's log: prints one line for each restart, and kills the workers that torchrun
    ends because another one has failed. torchrun sends them SIGTERM and waits for 30 seconds, which
    may be in vain: Python runs a handler only after a blocking call in C returns, and waiting for a
    lost peer may take long; a stopped process runs no handler at all.

    Args:
        restarts: how many failures lead to a restart.
        of_many: other nodes belong to the run.
    """

    def __init__(self, restarts: int, of_many: bool):
        super().__init__()
        self.restarts, self.of_many, self.started = restarts, of_many, 0
        self.may_save = False  # the workers were asked to stop, and may still save a checkpoint
        self.killed: set[int] = set()  # process ids

    def emit(self, record: logging.LogRecord) -> None:
        text, arguments = str(record.msg), cast(tuple[Any, ...], record.args)
        if "death signal" in text:
            self.may_save = True
        elif "Starting worker group" in text:
            self.may_save = False
        elif text.startswith("Sending process"):
            if not self.may_save and _signal_behind(sys.exc_info()[1]) is None:
                self.killed.add(arguments[0])
                kill_groups([arguments[0]])
        elif text.startswith("failed (exitcode") and self.started < self.restarts:
            self.started += 1
            if previous_exit_code() is None:
                code, local_rank = arguments[:2]
                self._say(
                    f"process {local_rank} of {socket.gethostname()} {self.ended_how(code)}; all "
                    f"are started again ({self.started} of {self.restarts} times)"
                )
        elif "new nodes from group_rank" in text:
            self.may_save = True
            self._say("a node has joined; all processes are started again with it")

    def ended_how(self, code: int) -> str:
        """As the function; and why, where ranks have stopped together without a signal to this
        agent, which would have passed it on and ended."""
        if not self.of_many or code not in STOPPED:
            return ended_how(code)
        return f"{ended_how(code)}: another node is leaving, or one process has got a signal"

    def _say(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)


def _quiet_torchrun(events: _Events) -> None:
    """Hides warnings and tables that repeat what the launcher prints; LOGLEVEL=INFO shows them."""
    from torch.distributed.elastic.agent.server import api

    logger = logging.getLogger("torch.distributed")
    api.logger.setLevel(logging.INFO)
    if "LOGLEVEL" not in os.environ:
        logger.handlers.clear()
        logger.propagate = False
    logger.addHandler(events)


# ---- a lost rendezvous --------------------------------------------------------------------------


def _watch(remote: tuple[str, int], go_on: str) -> None:
    """Kills the workers and ends this process when the rendezvous, once it has answered, does not
    answer for SILENCE seconds. The agent itself notices a closed connection, but would wait much
    longer for a machine that lost power or network."""
    answered = None
    while True:
        time.sleep(PROBE)
        with contextlib.suppress(OSError), socket.create_connection(remote, timeout=PROBE):
            answered = time.monotonic()
        if answered is not None and time.monotonic() - answered > SILENCE:
            break
    workers = children()
    kill_groups(workers)
    time.sleep(GRACE)
    say(f"the rendezvous has not answered for {SILENCE + GRACE} s; {go_on}")
    kill_groups(children())
    shutil.rmtree(os.environ[LAUNCH_FOLDER], ignore_errors=True)
    os._exit(1)


def children() -> list[int]:
    """Process ids of this process's children (empty except on Linux)."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def kill_groups(processes: list[int]) -> None:
    """Kills these processes, each with the process group that it leads."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.killpg(process, signal.SIGKILL)
