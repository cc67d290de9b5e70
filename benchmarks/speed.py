"""What cpu.py and gpu.py have in common: the whole toolkit against the loops that people write."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import platform
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.common import machine, ratio
from benchmarks.contenders import (
    Ours,
    Texts,
    Usual,
    Way,
    compiled_way,
    our_ways,
    pad,
    usual_loader,
    usual_pictures,
    usual_ways,
    without_end,
)
from benchmarks.fused import bytes_of_a_sample
from benchmarks.loader import MEAN, STD
from benchmarks.loop import silent
from benchmarks.performance_page import draw, tables
from benchmarks.text_step import lengths_like_news, texts
from benchmarks.time_to_accuracy import Race, race
from utils.augment.crop_flip import CropFlip
from utils.data.image_loader import ImageLoader
from utils.data.images import load_image_data
from utils.data.text_loader import TextLoader
from utils.files import replace_file
from utils.fused import fuse
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.signals import Signals
from utils.training.objective import Precision

# Without so many left nothing is begun.
LEAST_SECONDS = 30
CLASSES, TOPICS, VOCABULARY, MAX_LEN = 10, 4, 30_000, 256
# Of the usual loop, in words: fp32, and what comes with autocast.
LAYOUTS = {"pictures": ("NCHW", "channels_last"), "texts": ("padded", "padded")}


@dataclass(frozen=True)
class Sizes:
    """Of a benchmark's cases.

    Attributes:
        depth, picture_batch, layers, dim, ffn, text_batch: of the models and their batches.
        pictures, texts: in the made-up data sets.
        turn_seconds: about how long a turn is.
        compile_seconds: without so many left torch.compile is not begun; it is stopped when what
            is left would be missing for the turns.
        precision: of autocast and of ours.
        race: of the way to an accuracy.
    """

    depth: int
    picture_batch: int
    pictures: int
    layers: int
    dim: int
    ffn: int
    text_batch: int
    texts: int
    turn_seconds: float
    compile_seconds: float
    precision: str
    race: Race


class Case:
    """A model and its data, for all contenders."""

    def __init__(self, name: str, model: nn.Module, batch: int, usual, loader, optimizers):
        self.name, self.model, self.batch = name, model, batch
        self.usual = usual  # () -> batches on the host, without end
        self.loader = loader  # () -> ours
        self.optimizers = optimizers  # PyTorch's own, and ours by name


def picture_case(sizes: Sizes, device: torch.device, workers: int) -> Case:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (sizes.pictures, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, sizes.pictures)
    batch = sizes.picture_batch

    def usual():
        return without_end(usual_loader(usual_pictures(images, labels), batch, workers, device))

    def ours():
        return ImageLoader(
            images, labels, mean=MEAN, std=STD, batch_size=batch, device=device,
            augment=CropFlip(32, 32), shuffle=True,
        )  # fmt: skip

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)

    torch.manual_seed(0)
    name = f"ResNet-{sizes.depth}, CIFAR stem, pictures of 32x32, batch {batch}"
    return Case(name, ResNet(sizes.depth, CLASSES), batch, usual, ours, (sgd, "sgd"))


def text_case(sizes: Sizes, device: torch.device, workers: int) -> Case:
    rng = np.random.default_rng(0)
    lengths = lengths_like_news(sizes.texts, MAX_LEN, rng)
    data, batch = texts(lengths, VOCABULARY, rng), sizes.text_batch

    def usual():
        return without_end(usual_loader(Texts(*data), batch, workers, device, pad))

    def ours():  # steps of equal work, so that a turn of few is like any other
        return TextLoader(
            *data, batch_size=batch, device=device, max_len=MAX_LEN, shuffle=True,
            batch_tokens=round(batch * lengths.mean()),
        )  # fmt: skip

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)

    torch.manual_seed(0)
    model = Transformer(
        VOCABULARY, TOPICS, sizes.layers, sizes.dim, sizes.dim // 64, sizes.ffn, MAX_LEN, 0.1
    )
    name = (
        f"Transformer of {sizes.layers} layers of {sizes.dim}, texts of {lengths.mean():.0f} "
        f"tokens in the mean, batch {batch}"
    )
    return Case(name, model, batch, usual, ours, (adamw, "adamw"))


def contender(case: Case, way: Way, device: torch.device, folder: Path, signals: Signals):
    """Ready to take steps."""
    if way.ours:
        optimizer = case.optimizers[1]
        return Ours(way, case.model, case.loader(), case.batch, optimizer, device, folder, signals)
    return Usual(way, case.model, case.usual(), case.batch, case.optimizers[0], device)


class Budget:
    """Of time: what does not fit is left out, and said."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class OutOfTime(BaseException):  # torch.compile would hand an Exception on as another one
    pass


@contextlib.contextmanager
def at_most(seconds: float):
    """Raises OutOfTime in what is done within, in the main thread, after so many seconds."""

    def stop(signum, frame):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compare(
    case: Case, ways: dict[str, Way], sizes: Sizes, options, budget: Budget, folder: Path
) -> dict:
    """The contenders in turn; a turn is as many steps as fit into `sizes.turn_seconds`, for each
    its own number."""
    device, signals = options.torch_device, Signals()
    ready, left_out, first = {}, {}, {}
    for name, way in ways.items():
        turns = 1.2 * sizes.turn_seconds * options.repetitions * (len(ready) + 1)
        most = budget.left - turns
        if most < (sizes.compile_seconds if way.compiled else LEAST_SECONDS):
            left_out[name] = "no time was left"
            continue
        try:
            print(f"  {name}: warming up", flush=True)
            with silent(), at_most(most):
                one = contender(case, way, device, folder / name.replace(" ", "_"), signals)
                first[name] = one.steps(1)
                one.steps(1)
                seconds = one.steps(2) / 2
        except OutOfTime:
            left_out[name] = f"not ready after {most:.0f} s"
            print(f"  {name}: left out, {left_out[name]}", flush=True)
            continue
        except Exception as error:  # a compiler that is not there, a kernel that it cannot make
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            print(f"  {name}: left out, {left_out[name]}", flush=True)
            continue
        ready[name] = one, max(1, round(sizes.turn_seconds / seconds))
    speeds = {name: [] for name in ready}
    peaks = dict.fromkeys(ready)
    for repetition in range(options.repetitions):
        if repetition and budget.left < 30:
            break
        order = list(ready) if repetition % 2 == 0 else list(reversed(ready))
        for name in order:
            one, steps = ready[name]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            with silent():
                seconds = one.steps(steps)
            speeds[name].append(steps * case.batch / seconds)
            if device.type == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated(device) - before
        print(f"  turn {repetition + 1} of {options.repetitions}", flush=True)
    shares = {name: of_a_step(one.shares()) for name, (one, _) in ready.items()}
    return {
        "ways": {name: way.what for name, way in ways.items()},
        "left_out": left_out,
        "samples_per_second": speeds,
        "ratios": {
            f"{name} / plain loop": ratio(speeds, name, "plain loop")
            for name in ready
            if name != "plain loop"
        },
        "seconds_of_the_first_step": first,
        "shares": shares,
        "peak_bytes": peaks,
        "bytes_kept_per_sample": kept(case, {name: ways[name] for name in ready}, device),
    }


def of_a_step(shares: dict[str, float]) -> dict[str, float]:
    """Without what lies between the turns."""
    step = {name: shares.get(name, 0.0) for name in ("data", "forward_backward", "optimizer")}
    total = sum(step.values())
    return {name: round(share / total, 3) for name, share in step.items()} if total else step


def kept(case: Case, ways: dict[str, Way], device: torch.device) -> dict[str, float]:
    """Bytes that autograd keeps for one sample's backward pass, of what is not compiled."""
    found = {}
    for name, way in ways.items():
        if way.compiled:
            continue
        model, precision = one_model(case, way, device), Precision(way.precision, device)

        def forward(n: int, model=model, precision=precision):
            with precision.autocast():
                return model(sample_inputs(case, n, device))

        found[name] = bytes_of_a_sample(model, forward)
    return found


def one_model(case: Case, way: Way, device: torch.device) -> nn.Module:
    memory = torch.channels_last if way.channels_last else torch.contiguous_format
    return fuse(copy.deepcopy(case.model).to(device, memory_format=memory).train(), way.fused)


def sample_inputs(case: Case, n: int, device: torch.device) -> torch.Tensor:
    if isinstance(case.model, ResNet):
        return torch.randn(n, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    return torch.randint(1, VOCABULARY, (n, 45), device=device)


# ---- the command ---------------------------------------------------------------------------------


def flags(description: str, minutes: float, repetitions: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=minutes, help=f"in all, about (default: {minutes:g})")
    add("--repetitions", type=int, default=repetitions, help=f"turns (default: {repetitions})")
    add("--workers", type=int, default=2, help="of the usual DataLoader (default: 2)")
    add("--threads", type=int, help="CPU threads (default: one for each core)")
    add("--only", choices=("pictures", "texts"), help="(default: both)")
    add("--no_compile", action="store_true", help="leave torch.compile out")
    add("--data_dir", type=Path, help="real pictures, train/<class>/ and test/<class>/: for the "
        "time to an accuracy")  # fmt: skip
    add("--cache_dir", type=Path, default=Path(".cache"), help="decoded pictures")
    add("--json", type=Path, required=True, help="where the figures go, and plots beside it")
    return parser


def run(options, sizes: Sizes) -> dict:
    """Measures, prints, and writes the JSON."""
    started, budget, device = time.monotonic(), Budget(options.minutes), options.torch_device
    if options.threads:
        torch.set_num_threads(options.threads)
    state = machine() | {"system": platform.platform(), "device": device.type}
    print(", ".join(f"{key} {value}" for key, value in state.items() if value), flush=True)
    cases: dict[str, Callable] = {"pictures": picture_case, "texts": text_case}
    compiled = not options.no_compile
    result = {"machine": state, "cases": {}, "race": None}
    chosen = [options.only] if options.only else list(cases)
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        """What there is so far: a run that is stopped leaves that."""
        result["minutes"] = round((time.monotonic() - started) / 60, 1)
        replace_file(options.json, f"{json.dumps(result, indent=1)}\n".encode())

    with tempfile.TemporaryDirectory() as folder:
        if options.data_dir is not None:
            data = load_image_data(
                "imagefolder", data_dir=options.data_dir, cache_dir=options.cache_dir, image_size=32
            )
            print("time to an accuracy, real pictures", flush=True)
            result["race"] = race(data, sizes.race, device, sizes.precision, options.workers,
                                  Path(folder, "race"))  # fmt: skip
            write()
        for index, kind in enumerate(reversed(chosen)):  # pictures last: they take what is left
            case = cases[kind](sizes, device, options.workers)
            print(case.name, flush=True)
            cuda = device.type == "cuda"
            ways = usual_ways(sizes.precision, LAYOUTS[kind])
            ways |= our_ways(sizes.precision, compiled and cuda, cuda and kind == "pictures")
            if compiled:  # last, for it takes long
                ways |= compiled_way(sizes.precision, LAYOUTS[kind])
            share = Budget(budget.left / 60 / (len(chosen) - index))
            found = compare(case, ways, sizes, options, share, Path(folder, kind))
            result["cases"] = {case.name: found, **result["cases"]}
            write()
    plot = options.json.with_suffix(".png")
    draw(result, plot)
    print(f"\n{tables(result)}\nwritten: {options.json} and {plot}, {result['minutes']} minutes")
    return result
