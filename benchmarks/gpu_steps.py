#!/usr/bin/env python3
"""Training steps of a ResNet-50 on one GPU: plain PyTorch, torch.compile, and the toolkit's.

    python benchmarks/gpu_steps.py --json runs/bench/gpu_steps.json

CIFAR stem, random pictures of 32 x 32, bf16, channels_last, cuDNN's search for plans; SGD with
Nesterov momentum unless a name says NGD. The toolkit's steps are taken by its Trainer: with loader,
crop and flip, guard, metrics and log. Those of PyTorch have a batch that lies on the GPU, no
augmentation, a fused optimizer, and read nothing: less work. Each way is built and warmed up, then
they take turns; compiling is timed apart. For both batches about four minutes, and 100 GB of GPU
memory at 1,024. What --minutes leaves no time for is left out; the JSON is written after each
batch.

`peak` is the memory of each way alone, without what the others hold.
"""

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget import Budget, attempt
from benchmarks.common import (
    in_words,
    machine,
    parser,
    ratio,
    side_by_side,
    silent,
    spread,
    write_json,
)
from benchmarks.contenders import Ours, Rule, Way
from benchmarks.made_up import MEAN, STD, pictures
from utils.augment.crop_flip import CropFlip
from utils.data.images.loader import ImageLoader
from utils.launch.signals import Signals
from utils.machine.backends import search_plans
from utils.models.resnet import ResNet

SGD, NGD = Rule("sgd", lr=0.01, weight_decay=5e-4), Rule("ngd", lr=1e-3, weight_decay=0.05)
TURN = 0.5  # seconds, about
STEPS_TO_SETTLE = 24  # by then NGD has left its first steps, and graphs are captured


def plain(model: nn.Module, mode: str | None, batch: int) -> Callable[[int], float]:
    """(steps) -> seconds, by plain PyTorch; `mode`: of torch.compile."""
    device = torch.device("cuda")
    called = model if mode is None else torch.compile(model, mode=mode, dynamic=False)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (batch,), device=device)

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(called(x), targets)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    return steps


def ways(batch: int) -> dict[str, Callable[[nn.Module, Path], Callable[[int], float]]]:
    """{name: (model, folder) -> (steps) -> seconds}, the most important ones first."""
    images, labels = pictures(60 * batch, np.random.default_rng(0))
    device, signals = torch.device("cuda"), Signals()

    def ours(rule: Rule, fused: str, graphs: bool):
        def build(model: nn.Module, folder: Path):
            loader = ImageLoader(
                images, labels, mean=MEAN, std=STD, batch_size=batch, device=device,
                augment=CropFlip(32, 32), shuffle=True,
            )  # fmt: skip
            way = Way(True, "", "bf16", True, fused=fused, graphs=graphs)
            return Ours(way, model, loader, rule, device, folder, signals).steps

        return build

    def theirs(mode: str | None):
        return lambda model, folder: plain(
            model.to(device, memory_format=torch.channels_last), mode, batch
        )

    found = {
        "--fused speed --cuda_graphs": ours(SGD, "speed", True),
        "PyTorch": theirs(None),
        "torch.compile": theirs("default"),
        "NGD --fused speed --cuda_graphs": ours(NGD, "speed", True),
        "torch.compile, reduce-overhead": theirs("reduce-overhead"),
        "--fused none --cuda_graphs": ours(SGD, "none", True),
        "NGD --fused none --cuda_graphs": ours(NGD, "none", True),
    }
    for name, rule in (("", SGD), ("NGD ", NGD)):
        for fused in ("none", "speed"):
            found[f"{name}--fused {fused}"] = ours(rule, fused, False)
    return found


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__, repetitions=3, threads=None)
    flags.add_argument("--batch", type=int, nargs="+", default=[1024, 128])
    flags.add_argument("--minutes", type=float, default=5, help="in all, about (default: 5)")
    flags.add_argument("--only", nargs="+", help="ways whose names contain one of these words")
    options = flags.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here", file=sys.stderr)
        return 2
    search_plans(True)
    state = machine() | {"cudnn": torch.backends.cudnn.version()}
    print(in_words(state), flush=True)
    ends, results = Budget(60 * options.minutes), {}
    for number, batch in enumerate(options.batch):
        seconds = ends.left / (len(options.batch) - number)
        results[f"batch {batch}"] = measured(options, batch, Budget(seconds))
        if options.json:
            write_json(options.json, {"machine": state, "results": results})
    return 0


def measured(options, batch: int, budget: Budget) -> dict:
    """Builds the ways, takes turns, and prints; samples a second of each turn by name, and more."""
    torch.manual_seed(0)
    model, built, left_out, first, peak = ResNet(50, 10), {}, {}, {}, {}
    print(f"ResNet-50, batch {batch}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, build) in enumerate(ways(batch).items()):
            if options.only and not any(word in name for word in options.only):
                continue
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            turns = options.repetitions * (len(built) + 1) * TURN
            with attempt(name, budget.left - turns, left_out):
                steps = build(copy.deepcopy(model), Path(folder, str(number)))
                first[name] = round(steps(1), 2)
                steps(STEPS_TO_SETTLE)
                one_turn = turn(steps, batch)
                one_turn()
                peak[name] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)
                built[name] = one_turn
        with silent():
            figures = side_by_side(built, options.repetitions, warm_up=False)
    theirs = [name for name in figures if name.startswith(("PyTorch", "torch"))]
    best = max(theirs or figures, key=lambda n: statistics.median(figures[n]), default=None)
    for name, values in figures.items():
        speed = statistics.median(values)
        print(
            f"  {name:32} {speed:7,.0f} pictures/s, {1e3 * batch / speed:6.2f} ms, "
            f"{spread(ratio(figures, name, best))} times {best}, first step {first[name]:.1f} s, "
            f"peak {peak[name]:.1f} GB",
            flush=True,
        )
    return {
        "samples_per_second": figures, "first_step_seconds": first, "peak_gb": peak,
        "left_out": left_out,
    }  # fmt: skip


def turn(steps: Callable[[int], float], batch: int) -> Callable[[], float]:
    """() -> samples a second in a turn of about TURN seconds."""
    count = max(4, round(TURN / (steps(4) / 4)))
    return lambda: count * batch / steps(count)


if __name__ == "__main__":
    sys.exit(main())
