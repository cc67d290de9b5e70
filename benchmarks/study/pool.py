"""Trains the runs, in this process or in several, all of which end with the study."""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait

from benchmarks.study.plan import Result, Run
from benchmarks.study.train import Bench, Setting
from utils.errors import UserError


def train_all(
    bench: Bench, jobs: int, next_runs: Callable[[], list[Run]]
) -> Iterator[tuple[Run, Result]]:
    """Yields runs as they finish, until `next_runs()` names none.

    `next_runs` is asked again after every run; the caller has noted its result by then.
    """
    if jobs == 1:
        while runs := next_runs():
            yield runs[0], bench.train(runs[0])
        return
    with Processes(bench.setting, jobs) as processes:
        while True:
            waiting = [run for run in next_runs() if run not in processes.running]
            processes.start(waiting)
            if not processes.running:
                return
            yield processes.wait()


class Processes:
    """Processes that each load the data once and train one run at a time."""

    def __init__(self, setting: Setting, jobs: int):
        context = multiprocessing.get_context("spawn")  # a fork would share PyTorch's threads
        self._processes, self._runs = {}, {}  # by the connection to each; None: it is free
        with _interrupt_held():
            for _ in range(jobs):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(setting, theirs), daemon=True)
                process.start()
                theirs.close()  # so that the connection ends with the process
                self._processes[ours], self._runs[ours] = process, None

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join()

    @property
    def running(self) -> list[Run]:
        return [run for run in self._runs.values() if run is not None]

    def start(self, runs: list[Run]) -> None:
        """As many of `runs` as there are free processes, the first ones first."""
        free = [connection for connection, run in self._runs.items() if run is None]
        for connection, run in zip(free, runs, strict=False):
            try:
                connection.send(run)
            except OSError:
                raise self._lost(connection) from None
            self._runs[connection] = run

    def wait(self) -> tuple[Run, Result]:
        """The next run that finishes. Raises what its process raised."""
        connection = wait([c for c, run in self._runs.items() if run is not None])[0]
        try:
            answer = connection.recv()
        except EOFError:
            raise self._lost(connection) from None
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"in a process of the study:\n{answer}")
        run, self._runs[connection] = self._runs[connection], None
        return run, answer

    def _lost(self, connection) -> UserError:
        process = self._processes[connection]
        process.join()
        return UserError(
            f"a process of the study ended with code {process.exitcode}, perhaps because "
            "memory ran out: take fewer --jobs and start again, finished runs are kept"
        )


@contextlib.contextmanager
def _interrupt_held():
    """Delays a Ctrl-C to the end of the block: a process that is still starting would print a
    traceback. Processes started within ignore Ctrl-C; their parent ends them."""
    came = []
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def _work(setting: Setting, connection) -> None:
    """Of each process: trains what it is sent. It ends with the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        bench = Bench(setting)
        while True:
            connection.send(bench.train(connection.recv()))
    except EOFError:
        return
    except UserError as error:
        connection.send(error)
    except Exception:
        connection.send(traceback.format_exc())


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
