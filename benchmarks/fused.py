#!/usr/bin/env python3
"""Fused modules against the plain ones: the time of a training step, and the bytes it keeps.

    python benchmarks/fused.py
    python benchmarks/fused.py --only "ResNet-50" --batch 32 --repetitions 3

The plain model and those with --fused memory and speed have the same weights and take turns; a turn
is a forward and a backward pass of random pictures of 32x32 (CIFAR stem, channels_last) or texts of
64 tokens. `step time, memory / plain` is a ratio of times. Bytes are those that autograd keeps from
the forward to the backward pass for one more sample, without weights; each storage counts once. The
losses are checked to be equal.
"""

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import median_and_range, parser, ratio, report, side_by_side
from benchmarks.made_up import CPU, random_batch
from utils.fused import fuse
from utils.machine.host_memory import keep_freed_memory
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.training.objective import Precision

CLASSES = 10


def texts(n: int) -> torch.Tensor:
    return torch.randint(1, 1000, (n, 64))


CASES = {  # name -> (model, inputs)
    "ResNet-50": (lambda: ResNet(50, CLASSES), random_batch),
    "ResNet-18 of width 16": (lambda: ResNet(18, CLASSES, 16), random_batch),
    "Transformer 6x512": (lambda: Transformer(1000, CLASSES, attention_dropout=0.0), texts),
}
FUSED = ("memory", "speed")
PRECISIONS = ("fp32", "bf16")


def bytes_kept(model: nn.Module, call) -> int:
    """What autograd keeps for the backward pass of call(model), without the model's own tensors;
    each storage counts once."""
    own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    kept, alive = {}, []

    def pack(tensor):
        alive.append(tensor)  # so that its storage is not used again
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(model)
    return sum(kept.values())


def bytes_of_a_sample(model: nn.Module, forward: Callable[[int], torch.Tensor]) -> float:
    """Kept for the backward pass of forward(samples)."""
    six, two = (bytes_kept(model, lambda _, n=n: forward(n)) for n in (6, 2))
    return (six - two) / 4


def measure(case: str, precision: str, options) -> dict:
    build, inputs = CASES[case]
    torch.manual_seed(0)
    plain = build().to(memory_format=torch.channels_last)
    models = {"plain": plain} | {name: fuse(copy.deepcopy(plain), name) for name in FUSED}
    arithmetic = Precision(precision, CPU)
    x, targets = inputs(options.batch), torch.arange(options.batch) % CLASSES

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with arithmetic.autocast():
            return model(x)

    losses = {}

    def training(name: str) -> Callable[[], float]:
        model = models[name]

        def run() -> float:
            torch.manual_seed(1)
            model.zero_grad(set_to_none=True)
            started = time.perf_counter()
            loss = F.cross_entropy(forward(model, x).float(), targets)
            loss.backward()
            losses[name] = loss.item()
            return options.batch / (time.perf_counter() - started)

        return run

    kept = {
        name: bytes_of_a_sample(model, lambda n, model=model: forward(model, inputs(n)))
        for name, model in models.items()
    }
    for model in models.values():
        model.load_state_dict(plain.state_dict())
    figures = side_by_side({name: training(name) for name in models}, options.repetitions)
    difference = max(abs(losses["plain"] - losses[name]) for name in FUSED) / losses["plain"]
    assert difference < 1e-4, f"the losses differ by {difference}"
    return {
        "samples_per_second": figures,
        "bytes_kept_per_sample": kept,
        "ratios": {f"step time, {name} / plain": ratio(figures, "plain", name) for name in FUSED}
        | {
            f"bytes kept, {name} / plain": median_and_range([kept[name] / kept["plain"]])
            for name in FUSED
        },
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--batch", type=int, default=128, help="samples (default: 128)")
    flags.add_argument("--only", choices=CASES, help="one of the models (default: all)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the entry scripts do
    results = {}
    for case in [options.only] if options.only else CASES:
        for precision in PRECISIONS:
            name = f"{case}, {precision}, batch {options.batch}"
            results[name] = measure(case, precision, options)
            kept = results[name]["bytes_kept_per_sample"]
            megabytes = ", ".join(f"{mode} {value / 1e6:.2f}" for mode, value in kept.items())
            print(f"{name}: MB kept for a sample: {megabytes}")
    report("Fused modules: training steps", results, options.json)


if __name__ == "__main__":
    main()
