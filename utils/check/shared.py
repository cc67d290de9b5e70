"""What all hosts must have in common: the time, and the folder of the run."""

import contextlib
import os
import statistics
import time
import uuid
from pathlib import Path

from utils.exchange import Exchange
from utils.files import reason

ROUNDS = 9
PATIENCE = 10.0  # seconds in which a file must appear on other hosts, as NFS keeps listings


def clock_offsets(exchange: Exchange, clock=time.time) -> list[float]:
    """Seconds by which each rank's clock is ahead of that of rank 0, to within the time of a
    barrier. Collective."""
    stamps = []
    for _ in range(ROUNDS):
        exchange.barrier()
        stamps.append(clock())
    told = exchange.gather_json(stamps)
    return [
        statistics.median(a - b for a, b in zip(own, told[0], strict=True)) for own in told
    ]  # fmt: skip


def folder_problem(
    exchange: Exchange, folder: Path, host: str, patience: float = PATIENCE
) -> str | None:
    """Whether every host can write to `folder`, and sees what the others write. Collective; leaves
    no file behind, nor the folder if it was not there.

    Returns:
        what is wrong, or None; the same on all ranks.
    """
    name = exchange.gather_json(uuid.uuid4().hex[:8])[0]
    # Path.exists would raise what writing finds out, too, as that there is no permission.
    made = not os.path.exists(folder)
    exchange.barrier()
    own, problem = folder / f".check-{name}-{exchange.rank}", None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(name, encoding="ascii")
    except OSError as error:
        problem = f"{host} cannot write to it: {reason(error)}"
    problems = exchange.gather_json(problem)
    if not any(problems):
        others = [folder / f".check-{name}-{rank}" for rank in range(exchange.size)]
        absent = _wait_for(others, patience)
        problem = f"{host} does not see what other hosts write there" if absent else None
        problems = exchange.gather_json(problem)
    with contextlib.suppress(OSError):
        own.unlink()
    exchange.barrier()
    if made and exchange.rank == 0:
        with contextlib.suppress(OSError):  # it is not empty: others use it
            folder.rmdir()
    return next(filter(None, problems), None)


def _wait_for(paths: list[Path], patience: float) -> list[Path]:
    """Those that have not appeared in time."""
    end = time.monotonic() + patience
    while absent := [path for path in paths if not os.path.exists(path)]:
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    return absent
