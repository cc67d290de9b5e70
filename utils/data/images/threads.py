"""Work on pictures in threads: Pillow releases the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor


def in_threads(function: Callable, items: Iterable, workers: int, name: str) -> Generator:
    """function(item) for each item, in order. A few more than `workers` results are in memory.

    Args:
        name: what the threads' names begin with.
    """
    pending: deque = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
