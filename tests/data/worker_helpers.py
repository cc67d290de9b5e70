"""What worker processes import in tests (not PyTorch), and a program that some tests kill."""

import os
import signal
import time
from multiprocessing import active_children, get_context

import numpy as np


def worker_processes() -> list:
    """Those of this process. (Other tests keep processes that they have not spawned but forked.)"""
    return [p for p in active_children() if isinstance(p, get_context("spawn").Process)]


class Fault:
    """An augmentation that goes wrong for one sample: the process dies, or an exception."""

    def __init__(self, row: int, deadly: bool):
        self.row, self.deadly = row, deadly

    def apply(self, images, plan, index):
        if self.row in index:
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"row {self.row} is no good")
        return images[index]


class Hang:
    """An augmentation that never ends for one sample: for the first `times` processes that come
    across it, which write their numbers into `file`."""

    def __init__(self, row: int, file: str, times: int):
        self.row, self.file, self.times = row, file, times

    def apply(self, images, plan, index):
        with open(self.file, "a+") as file:
            file.seek(0)
            if self.row in index and len(file.readlines()) < self.times:
                print(os.getpid(), file=file, flush=True)
                time.sleep(1e6)
        return images[index]


class Plan:
    def slice(self, piece):
        return self


# Arguments: the file of pictures; "held" waits after the first batch, "whole" runs to the end.
PROGRAM = """
import signal, sys, time
from multiprocessing import active_children
import numpy as np
from utils.data.workers import WorkerPool
if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    images = np.load(sys.argv[1], mmap_mode="r")
    pool = WorkerPool(2, images[:8].nbytes, warn=print)
    def pieces():
        print(*(worker.pid for worker in active_children()), flush=True)  # they were just started
        for rows in np.split(np.arange(len(images)), range(8, len(images), 8)):
            yield rows, None
    reader = pool.reader(images, None)
    batches = pool.batches(reader, pieces(), lambda pictures: int(pictures.sum()))
    total = next(batches)
    print("first", flush=True)
    if sys.argv[2] == "held":
        time.sleep(3600)
    for part in batches:
        total += part
        time.sleep(0.01)
    sys.stdin.read()  # Python's own end puts the signals back to what kills: not before the last
    print(total, flush=True)  # and ends without closing the pool, an iterator still there
"""


def mapped(path, n=61, height=6, width=8, channels=3) -> np.memmap:
    shape = (n, height, width, channels)
    np.save(path, np.random.default_rng(n).integers(0, 256, shape, dtype=np.uint8))
    return np.load(path, mmap_mode="r")
