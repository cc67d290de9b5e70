"""What cpu.py and gpu.py share: the whole toolkit against the loops that people write."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.budget import Budget, in_a_line
from benchmarks.cases import Sizes, picture_case, text_case
from benchmarks.common import in_words, machine
from benchmarks.compare import compare
from benchmarks.contenders import Way, compiled_ways, our_ways, usual_ways
from benchmarks.speed_page import draw, tables
from benchmarks.time_to_accuracy import race
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data
from utils.errors import UserError
from utils.files import replace_file

CASES = {"texts": text_case, "pictures": picture_case}  # pictures last: they take what is left
# How the tables describe the inputs of the usual loops: in fp32, and under autocast.
LAYOUTS = {"pictures": ("NCHW", "channels_last"), "texts": ("padded", "padded")}
RACE_FRACTION = 0.3  # of the time, at most, is for the time to an accuracy


def flags(description: str, minutes: float, repetitions: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=minutes, help=f"in all, about (default: {minutes:g})")
    add("--repetitions", type=int, default=repetitions, help=f"turns (default: {repetitions})")
    add("--workers", type=int, help="of the usual DataLoader (default: 2 on a CPU; on a GPU one "
        "for each core, 16 at most)")  # fmt: skip
    add("--threads", type=int, help="CPU threads (default: one for each core)")
    add("--only", choices=("pictures", "texts"), help="(default: both)")
    add("--no_compile", action="store_true", help="leave torch.compile out")
    add("--data_dir", type=Path, help="real pictures, train/<class>/ and test/<class>/: for the "
        "time to an accuracy")  # fmt: skip
    add("--cache_dir", type=Path, default=Path(".cache"), help="decoded pictures")
    add("--json", type=Path, required=True, help="where the figures go, and plots beside it")
    return parser


# What a worker of each of the five usual loops has in shared memory: two batches of pictures.
SHARED_BYTES = 5 * 2 * 1024 * 3 * 32 * 32 * 4
LEAST_WORKERS = 2


def default_workers(device: torch.device) -> int:
    """Raises UserError if shared memory is so small that the usual loops would starve."""
    if device.type != "cuda":
        return 2
    most = min(16, os.cpu_count() or 2)
    with contextlib.suppress(OSError):  # no Linux
        free = shutil.disk_usage("/dev/shm").free
        fits = int(free / 2 / SHARED_BYTES)
        if fits < min(LEAST_WORKERS, most):
            raise UserError(
                f"/dev/shm has {free / 1e6:,.0f} MB free, too little for the workers of the usual "
                "loops: `mount -o remount,size=8g /dev/shm` or `docker run --shm-size=8g` gives "
                "more; or choose --workers yourself"
            )
        if fits < most:
            print(
                f"note: {fits} workers, not {most}, since /dev/shm has {free / 1e6:,.0f} MB free; "
                "docker run --shm-size=8g gives a container more",
                file=sys.stderr,
            )
        return min(most, fits)
    return most


def ways_of(kind: str, precision: str, cuda: bool, compiled: bool) -> dict[str, Way]:
    """In the order in which they are started: compiled ones last, since they take long."""
    layout, graphs = LAYOUTS[kind], cuda and kind == "pictures"
    ways = usual_ways(precision, layout, cuda) | our_ways(precision, cuda, graphs)
    if compiled:
        ways |= compiled_ways(precision, layout, ours=cuda, graphs=graphs)
    return ways


def run(options, sizes: Sizes) -> dict:
    """Measures, prints, and writes the JSON."""
    started, budget, device = time.monotonic(), Budget(60 * options.minutes), options.torch_device
    set_up(options)
    state = machine() | {
        "system": platform.platform(), "device": device.type, "workers": options.workers,
    }  # fmt: skip
    print(in_words(state), flush=True)
    result = {"machine": state, "cases": {}, "race": None}
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        """The figures so far, for a run that is stopped."""
        result["minutes"] = round((time.monotonic() - started) / 60, 1)
        replace_file(options.json, f"{json.dumps(result, indent=1)}\n".encode())

    with tempfile.TemporaryDirectory() as folder:
        if options.data_dir is not None:
            result["race"] = raced(
                options, sizes, RACE_FRACTION * budget.left, Path(folder, "race")
            )
            write()
        for name, found in measured(options, sizes, budget, Path(folder)):
            result["cases"] = {name: found, **result["cases"]}
            write()
    show(result, options.json)
    return result


def set_up(options) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.workers is None:
        options.workers = default_workers(options.torch_device)


def raced(options, sizes: Sizes, seconds: float, folder: Path) -> dict:
    data = partial(
        load_image_data,
        "imagefolder",
        PictureRequest(options.data_dir, options.cache_dir, image_size=32),
    )
    print("time to an accuracy, real pictures", flush=True)
    device, workers = options.torch_device, options.workers
    return race(data, sizes.race, device, sizes.precision, workers, folder, seconds)


def measured(options, sizes: Sizes, budget: Budget, folder: Path) -> Iterator[tuple[str, dict]]:
    """(name, figures or {"failed": reason}) of each case. The time is divided among the cases in
    proportion to their numbers of contenders."""
    device, kinds = options.torch_device, [options.only] if options.only else CASES
    cuda, compiled = device.type == "cuda", not options.no_compile
    ways = {kind: ways_of(kind, sizes.precision, cuda, compiled) for kind in kinds}
    while ways:
        kind, share = next(iter(ways)), budget.left / sum(map(len, ways.values()))
        name, contenders = kind, ways.pop(kind)
        gc.collect()  # GPU memory of the case before
        try:
            case = CASES[kind](sizes, device, options.workers)
            name = case.name
            print(name, flush=True)
            time_for_it = Budget(share * len(contenders))
            found = compare(case, contenders, sizes, options, time_for_it, folder / kind)
        except Exception as error:
            found = {"failed": in_a_line(error)}
            print(f"  failed: {found['failed']}", flush=True)
        yield name, found


def show(result: dict, path: Path) -> None:
    """The tables, and a plot beside the JSON."""
    print(f"\n{tables(result)}\nwritten: {path}, {result['minutes']} minutes", flush=True)
    plot = path.with_suffix(".png")
    try:
        draw(result, plot)
    except ImportError as error:
        print(f"no plot: {error}")
    else:
        print(f"written: {plot}")
