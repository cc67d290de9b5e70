#!/usr/bin/env python3
"""The Triton kernels for pictures on one GPU, in several forms: the bandwidth of each.

    python benchmarks/gpu_kernels.py --json runs/bench/gpu_kernels.json

A form is the elements of a tile, the tiles that loops load ahead (0: as the compiler likes), warps,
and the programs that divide a sum. GB/s are the bytes of each tensor read and written once, over
the median time; `copy` is PyTorch's, as the ceiling. About a minute, most of it compiling.
"""

import importlib.util
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import in_words, machine, parser, write_json
from utils.fused.kernels import image_kernels

FORMS = [  # (tile, stages, warps, programs); the second as it was before a GPU had measured it
    (2048, 3, 4, 512), (4096, 0, 8, 512), (2048, 3, 8, 512), (2048, 2, 4, 1056),
    (2048, 3, 4, 1056), (2048, 4, 4, 528), (4096, 2, 8, 512), (4096, 3, 8, 528),
    (2048, 0, 4, 1056), (4096, 0, 4, 528), (1024, 4, 4, 1056), (8192, 0, 8, 264),
]  # fmt: skip
SHAPES = [(1024, 64, 32, 32), (1024, 256, 32, 32), (1024, 512, 16, 16), (1024, 2048, 4, 4)]
CALLS = 4  # in a turn


def kernels_of(form: tuple[int, ...], folder: Path) -> ModuleType:
    """A copy of image_kernels.py with these constants: Triton compiles what stands in the file."""
    tile, stages, warps, programs = form
    text = Path(image_kernels.__file__).read_text()
    for pattern, value in (
        (r"^TILE = \d+", f"TILE = {tile}"),
        (r"^PROGRAMS = \d+", f"PROGRAMS = {programs}"),
        (r"^STAGES = .*", f"STAGES = tl.constexpr({stages})"),
        (r'"num_warps": \d+', f'"num_warps": {warps}'),
        (r", num_stages=STAGES", ", num_stages=STAGES" if stages else ""),
    ):
        text, found = re.subn(pattern, value, text, flags=re.MULTILINE)
        assert found, pattern
    path = folder / ("form_" + "_".join(map(str, form)) + ".py")
    path.write_text(text)
    # In the package of the original, for its relative imports.
    name = f"{image_kernels.__package__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(k: ModuleType, shape: tuple[int, ...]) -> dict[str, tuple[Callable, int]]:
    """{name: (a call, tensors that it reads and writes)}"""
    c, grad, y = (
        torch.randn(shape, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
        for _ in range(3)
    )
    out, one = torch.empty_like(c), torch.ones(shape[1], device="cuda")
    values = k.batch_values(c, one, one, 1e-5, None, None, 0.0)
    sums = k.gradient_sums(grad, c, values, relu=True)
    return {
        "copy": (lambda: out.copy_(c), 2),
        "batch_values": (lambda: k.batch_values(c, one, one, 1e-5, None, None, 0.0), 1),
        "gradient_sums": (lambda: k.gradient_sums(grad, c, values, relu=True), 2),
        "gradient_sums, y": (lambda: k.gradient_sums(grad, c, values, y=y, relu_grad=out), 4),
        "affine": (lambda: k.affine(c, one, one, True, out=out), 2),
        "affine + add": (lambda: k.affine(c, one, one, True, None, 1.0, y, out=out), 3),
        "input_gradient": (
            lambda: k.input_gradient(grad, c, values, sums, relu=True, out=out), 3,
        ),
    }  # fmt: skip


def seconds_of(call: Callable, turns: int) -> float:
    call(), call()
    times = []
    for _ in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, repetitions=5, threads=None).parse_args(argv)
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here", file=sys.stderr)
        return 2
    print(in_words(machine()))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            kernels = kernels_of(form, Path(folder))
            for shape in SHAPES:
                size = 2 * torch.Size(shape).numel() / 1e9  # GB of a tensor
                found = {
                    name: round(tensors * size / seconds_of(call, options.repetitions))
                    for name, (call, tensors) in runs(kernels, shape).items()
                }
                results[f"{form} {shape}"] = found
                print(f"{form} {shape} {found}", flush=True)
    if options.json:
        write_json(options.json, {"machine": machine(), "gb_per_second": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
