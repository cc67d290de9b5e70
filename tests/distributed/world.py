"""Groups of processes over gloo that run one test case after another. Importing PyTorch takes
seconds, so one process does it and all others are its forks; a group is started once for each
number of processes."""

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from multiprocessing.connection import wait

from patience import PATIENCE

# Imported before the forks. No module of this project: sys.path decides later which one it is.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.func"]
# Seconds that the other ranks have after an exception of one: they may wait for it in vain.
AFTER_A_FAILURE = 10


class World:
    """`size` processes, each with one thread and the default process group."""

    def __init__(self, size: int):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        folder = tempfile.mkdtemp(prefix="world-")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"{folder}/store", theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case, *args) -> list:
        """[case(exchange, *args) of each rank]: `case` is a function of a test module; what it
        takes and returns is pickled. An exception of a rank is raised here, with its traceback."""
        assert self.alive, "a rank of this group has died in an earlier test"
        for pipe in self.pipes:
            pipe.send((list(sys.path), case, args))
        results, failures = [None] * self.size, []
        waiting, patience = dict(zip(self.pipes, range(self.size), strict=True)), PATIENCE
        while waiting:
            answered = wait(list(waiting), patience)
            for pipe in answered:
                rank = waiting.pop(pipe)
                try:
                    text, results[rank] = pipe.recv()
                    if text:
                        patience = AFTER_A_FAILURE
                except (EOFError, OSError) as error:  # the others will notice
                    text = f"it died: {error!r}"
                if text:
                    failures.append(f"rank {rank}: {text}")
            if not answered:
                failures += [f"rank {rank}: no answer" for rank in waiting.values()]
                break
        if failures:
            self.close()  # the ranks may be out of step
            raise AssertionError("\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []


class Worlds:
    """`worlds(2)`: the group of two, started at the first call, and again after a failure."""

    def __init__(self):
        self.groups: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if size not in self.groups or not self.groups[size].alive:
            self.groups[size] = World(size)
        return self.groups[size]

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(rank: int, size: int, store: str, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdin = open(os.devnull)  # noqa: SIM115
    import datetime

    import torch
    import torch.distributed as dist

    from utils.distributed.exchange import ProcessExchange

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    while True:
        try:
            path, case, args = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        text, result = "", None
        try:
            result = case(ProcessExchange(local_rank=rank), *args)
        except BaseException:
            text = traceback.format_exc()
        pipe.send((text, result))
