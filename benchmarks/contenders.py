"""What cpu.py and gpu.py time against each other: a training loop as people write it, and ours.

The usual loop over pictures has torchvision's transforms in a DataLoader with workers; the one over
texts pads random batches to their longest text. Both read the loss in every step, as torchvision's
reference scripts do. All train the same network by the same optimizer with the same weight decay;
the usual loops' has PyTorch's defaults, or is Apex's, and ours has `fused=True`, as always in the
toolkit. All let cuDNN benchmark its convolutions, and none uses its attention, which makes a plan
for every new length.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.loader import Pictures, torchvision_transform
from benchmarks.loop import make_trainer, take_steps
from benchmarks.made_up import MEAN, STD
from utils.engines.engine import CudaGraphs, RunFacts
from utils.fused import MODES
from utils.launch.signals import Signals
from utils.machine.backends import prefer_flash_attention, search_plans
from utils.optim import apex
from utils.optim.factory import is_capturable
from utils.reporting.metrics import read_metrics
from utils.training.objective import Precision
from utils.training.times import PhaseTimes, wait_for


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        ours: the toolkit's own loop and loader; else the usual ones.
        what: the description in the table.
        fused: the mode of --fused; only ours has it.
        graphs: CUDA graphs: --cuda_graphs of ours, the mode "reduce-overhead" of torch.compile.
        keeps: freed memory stays in the process (see utils/machine/host_memory.py).
        apex: the usual loop's optimizer is Apex's.
    """

    ours: bool
    what: str
    precision: str = "fp32"
    channels_last: bool = False
    compiled: bool = False
    fused: str = "none"
    graphs: bool = False
    keeps: bool = False
    apex: bool = False


def usual_ways(precision: str, layout: tuple[str, str], cuda: bool) -> dict[str, Way]:
    """The loop that people write, plain and under autocast.

    Args:
        precision: of autocast.
        layout: descriptions of the inputs: in the plain loop, and in the others.
        cuda: False adds a loop that keeps freed memory, as the toolkit does on a CPU; True, one
            with Apex's optimizer, where Apex is installed with its extension.
    """
    what = f"{precision}, {layout[1]}"
    ways = {
        "plain loop": Way(False, f"fp32, {layout[0]}"),
        "autocast": Way(False, what, precision, True),
    }
    if not cuda:
        kept = f"{what}, freed memory kept"
        ways["autocast, kept"] = Way(False, kept, precision, True, keeps=True)
    elif not apex.missing():
        ways["autocast, Apex"] = Way(False, f"{what}, Apex's optimizer", precision, True, apex=True)
    return ways


def our_ways(precision: str, cuda: bool, graphs: bool) -> dict[str, Way]:
    """The toolkit's loop with each of its flags for speed but --compile.

    Args:
        graphs: add one with --fused speed --cuda_graphs. A graph holds the memory of a step between
            its turns too.
    """
    ways = {"ours": Way(True, precision, precision, True, keeps=not cuda)}
    for mode in MODES[1:]:
        what = f"{precision}, --fused {mode}"
        ways[f"ours, {mode}"] = Way(True, what, precision, True, fused=mode, keeps=not cuda)
    if graphs:
        what = f"{precision}, --fused speed --cuda_graphs"
        ways["ours, speed, graphs"] = Way(True, what, precision, True, fused="speed", graphs=True)
    return ways


def compiled_ways(
    precision: str, layout: tuple[str, str], ours: bool, graphs: bool
) -> dict[str, Way]:
    """Autocast and torch.compile with its defaults: shapes become dynamic when they change.

    Args:
        ours: add ours with --compile.
        graphs: add the mode "reduce-overhead".
    """
    what = f"{precision}, {layout[1]}, torch.compile"
    ways = {"compile": Way(False, what, precision, True, True)}
    if graphs:
        mode = f"{what} (reduce-overhead)"
        ways["compile, graphs"] = Way(False, mode, precision, True, True, graphs=True)
    if ours:
        ways["ours, compile"] = Way(True, f"{precision}, --compile", precision, True, True)
    return ways


@dataclass(frozen=True)
class Rule:
    """The optimizer of all contenders, with weight decay on every parameter.

    Attributes:
        name: "sgd", with Nesterov momentum of 0.9, or "adamw".
    """

    name: str
    lr: float
    weight_decay: float

    def usual(self, model: nn.Module) -> torch.optim.Optimizer:
        """With PyTorch's defaults."""
        parameters, both = model.parameters(), {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "adamw":
            return torch.optim.AdamW(parameters, **both)
        return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, **both)

    def apex(self, model: nn.Module) -> torch.optim.Optimizer:
        """By Apex's own classes, as scripts use them."""
        from apex.optimizers import FusedAdam, FusedSGD

        parameters, both = model.parameters(), {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "adamw":
            return FusedAdam(parameters, betas=(0.9, 0.999), eps=1e-8, **both)
        return FusedSGD(parameters, momentum=0.9, nesterov=True, **both)

    def ours(self) -> dict:
        """For `make_trainer`."""
        return {
            "optimizer": self.name, "lr": self.lr, "weight_decay": self.weight_decay,
            "decay_all": True,
        }  # fmt: skip


class Usual:
    """The loop that people write.

    Args:
        model: on the CPU; trained as a copy.
        batches: endless (inputs, targets) of `batch` samples on the host.
        ahead: how many of them workers may have prefetched.
    """

    def __init__(
        self,
        way: Way,
        model: nn.Module,
        batches: Iterator[tuple[Tensor, Tensor]],
        batch: int,
        rule: Rule,
        device: torch.device,
        ahead: int = 0,
    ):
        search_plans(True)
        prefer_flash_attention()
        memory = torch.channels_last if way.channels_last else torch.contiguous_format
        self.model = copy.deepcopy(model).to(device, memory_format=memory).train()
        mode = "reduce-overhead" if way.graphs else "default"
        self.called = torch.compile(self.model, mode=mode) if way.compiled else self.model
        self.optimizer = rule.apex(self.model) if way.apex else rule.usual(self.model)
        self.precision = Precision(way.precision, device)
        self.batches, self.batch, self.device, self.ahead = batches, batch, device, ahead
        self.times, self.loss, self.way = PhaseTimes(device), 0.0, way

    def steps(self, count: int) -> float:
        """Takes `count` steps; seconds. Batches prefetched since the last call are dropped first:
        they cost nothing now."""
        for _ in itertools.islice(self.batches, self.ahead):
            pass
        times, started = self.times, time.perf_counter()
        times.mark("other")
        for inputs, targets in itertools.islice(self.batches, count):
            self.step(inputs, targets)
        wait_for(self.device)
        times.read()
        return time.perf_counter() - started

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        inputs = inputs.to(self.device, non_blocking=True)
        if self.way.channels_last and inputs.ndim == 4:
            inputs = inputs.to(memory_format=torch.channels_last)
        targets = targets.to(self.device, non_blocking=True)
        self.times.mark("data")
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = F.cross_entropy(self.called(inputs), targets)
        loss.backward()
        self.times.mark("forward_backward")
        self.optimizer.step()
        self.loss += loss.item()
        self.times.mark("optimizer")

    def shares(self) -> dict[str, float]:
        """Fraction of the time since the last call, by phase."""
        return self.times.fractions()


class Ours:
    """The toolkit's loop, through its Trainer.

    Args:
        model: on the CPU; trained as a copy.
        loader: of batches on the device.
    """

    def __init__(
        self,
        way: Way,
        model: nn.Module,
        loader,
        rule: Rule,
        device: torch.device,
        folder: Path,
        signals: Signals,
    ):
        prefer_flash_attention()
        self.folder, self.way = folder, way
        model = copy.deepcopy(model).to(device, memory_format=torch.channels_last)
        self.trainer = make_trainer(
            model, folder, signals, loader=loader, precision=way.precision, device=device,
            fused=way.fused, compiled=way.compiled, **rule.ours(),
        )  # fmt: skip
        if way.graphs:
            self._take_steps_by_graphs(rule)

    def _take_steps_by_graphs(self, rule: Rule) -> None:
        trainer, engine = self.trainer, CudaGraphs(asked=True)
        reason = engine.why_not(
            RunFacts(
                device=trainer.steps.precision.device,
                compiled=self.way.compiled,
                shapes_vary=False,
                scales_loss=trainer.steps.precision.scales_loss,
                processes=1,
                accumulation=trainer.loader.accumulation,
                capturable=is_capturable(rule.name, lookahead_k=None),
                learns_mixing=False,
                unfreezes=False,
                recomputes=False,
                external_model=False,
            )
        )
        if reason is not None:
            raise RuntimeError(f"no graph: {reason}")
        trainer.steps = engine.steps(trainer.steps.parts, trainer.loader, trainer.log.console)

    def steps(self, count: int) -> float:
        """Takes `count` steps; seconds. Raises RuntimeError if graphs are wanted and refused."""
        speed = take_steps(self.trainer, count)
        if self.way.graphs and self.trainer.steps.refused:
            raise RuntimeError(f"no graph: {self.trainer.steps.refused}")
        return count * self.trainer.loader.batch_size / speed

    def shares(self) -> dict[str, float]:
        """Fraction of the time of the last steps, by phase."""
        records = [r for r in read_metrics(self.folder / "metrics.jsonl") if "time_share" in r]
        return records[-1]["time_share"]


# ---- data of the usual loops --------------------------------------------------------------------


def usual_pictures(images: np.ndarray, labels: np.ndarray, mean=MEAN, std=STD) -> Pictures:
    """(n, 32, 32, 3) uint8, cropped, flipped and normalised one by one by torchvision."""
    to_tensor = [transforms.ToTensor(), transforms.Normalize(mean, std)]
    return Pictures(images, labels, torchvision_transform(32, to_tensor))


class Texts(Dataset):
    """(ids, label) of each text, as a tokenizer leaves them."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray):
        self.tokens, self.offsets, self.labels = tokens.astype(np.int64), offsets, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        ids = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return torch.from_numpy(ids), int(self.labels[index])


def pad(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """(n, longest) int64, padded with 0, and the labels (n,)."""
    ids, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor(labels)


def usual_loader(dataset: Dataset, batch: int, workers: int, device, collate=None) -> DataLoader:
    return DataLoader(
        dataset, batch, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0, pin_memory=device.type == "cuda", collate_fn=collate,
    )  # fmt: skip


def without_end(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader
