"""For comparisons that take no time: sizes, options, a result, and fake contenders."""

import dataclasses
from pathlib import Path

import torch

from benchmarks import cpu, speed

TINY = dataclasses.replace(
    cpu.SIZES, depth=18, picture_batch=4, pictures=40, layers=1, dim=64, ffn=64, text_batch=8,
    texts=200, turn_seconds=0.1,
)  # fmt: skip


def options_of(path: Path, *words: str):
    parser = speed.flags("small", minutes=10, repetitions=2)
    options = parser.parse_args(["--json", str(path), "--workers", "0", *words])
    options.torch_device = torch.device("cpu")
    return options


def result_of(speeds: dict[str, list[float]], device: str = "cpu") -> dict:
    case = {
        "ways": {name: "as it is" for name in speeds} | {"compile": "torch.compile"},
        "left_out": {"compile": "no time was left"},
        "samples_per_second": speeds,
        "ratios": {"ours / plain loop": {"median": 2.5, "min": 2.0, "max": 3.0}},
        "seconds_of_the_first_step": dict.fromkeys(speeds, 1.25),
        "shares": {
            name: {"data": 0.5, "forward_backward": 0.3, "optimizer": 0.2} for name in speeds
        },
        "peak_bytes": dict.fromkeys(speeds),
        "bytes_kept_per_sample": {"ours": 1.5e6},
    }
    race = {
        "what": "ResNet-18 of width 8 on 100 real pictures",
        "target": 45,
        "curves": {"plain loop": [[10.0, 30.0], [20.0, 50.0]], "ours": [[4.0, 31.0], [8.0, 44.0]]},
        "seconds_to_target": {"plain loop": 20.0, "ours": None},
    }
    return {
        "machine": {"cpu": "a cpu", "device": device},
        "cases": {"A net, batch 4": case},
        "race": race,
    }


class InThisProcess:
    """In place of benchmarks.compare.ChildContender."""

    def __init__(self, make, environment=None):
        self.made = make()
        self.steps, self.shares, self.rest = self.made.steps, self.made.shares, self.made.rest

    def turn(self, count: int) -> tuple[float, int]:
        return self.made.turn(count)[0], 2 << 20

    def close(self) -> None:
        pass


class Fake:
    """In place of a contender: a step takes `seconds`; the call of `steps` after the first `calls`
    fails."""

    def __init__(self, seconds: float = 1.0, calls: int = 100, error: Exception | None = None):
        self.seconds, self.calls, self.error, self.called = seconds, calls, error, []

    def steps(self, count: int) -> float:
        self.called.append("steps")
        self.calls -= 1
        if self.calls < 0:
            raise self.error or RuntimeError("CUDA error: an illegal memory access\nmore | lines")
        return self.seconds * count

    def turn(self, count: int) -> tuple[float, int]:
        return self.steps(count), 77

    def rest(self) -> None:
        pass

    def shares(self) -> dict[str, float]:
        assert self.calls >= 0  # after a failure it is not called again
        self.called.append("shares")
        return {"data": 0.25, "forward_backward": 0.5, "other": 0.25}
