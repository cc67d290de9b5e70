"""Groups of processes with one thread each; while one group works, the others wait."""

import datetime
import multiprocessing
import os
import sys
import tempfile


class Ranks:
    """`size` processes. Each makes `work = build(exchange, folder, *args)` and then waits;
    `ranks(...)` calls `work(...)` in all of them and returns the results by rank.

    Args:
        build: a function of a module; what it and `work` take and return is pickled.
        first: called with the rank in each process, before it connects to the others; pickled.
    """

    def __init__(self, size: int, build, *args, first=None):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self.size, self._pipes, self._processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, self._folder.name, build, args, first, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, *args) -> list:
        for pipe in self._pipes:
            pipe.send(args)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            sys.exit("a process has failed")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, build, args: tuple, first, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if first is not None:
        first(rank)
    import torch
    import torch.distributed as dist

    from utils.distributed.exchange import ProcessExchange
    from utils.exchange import Exchange

    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=120),
        )
    work = build(ProcessExchange(local_rank=rank) if size > 1 else Exchange(), folder, *args)
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            break
        pipe.send(work(*given))
    if size > 1:
        dist.destroy_process_group()
