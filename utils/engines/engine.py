"""The engines, which compute optimizer steps, and which of them serves a run.

An engine of PyTorch is a class here that `choose_engine` tries; another one is a file in this
folder, a line in OTHERS and one of the choices of `--engine` (utils/settings/engine.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.loader import Loader
from ..distributed.strategies.base import Strategy
from ..errors import UserError
from ..optim.table import OPTIMIZERS
from ..place import resolve
from ..reporting.console import Console
from ..training.steps import Steps
from ..training.train_step import StepParts, TrainStep
from .capture import CudaRecorder
from .graphed_step import GraphedStep


@dataclass(frozen=True)
class RunFacts:
    """The facts that decide which engines can serve a run.

    Args:
        device: where the model is.
        compiled: the user wants the model compiled.
        shapes_vary: the inputs of one batch are of another shape than those of the next, as with
            --batch_tokens or --image_size_schedule.
        scales_loss: training is in fp16, with a loss scaler.
        processes: how many train together.
        accumulation: micro-batches of each rank in an optimizer step.
        capturable: a CUDA graph can hold the optimizer's step.
        learns_mixing: every step also learns how samples are mixed.
        unfreezes: frozen parameters are trained from some epoch on.
        recomputes: activations are computed again in the backward pass.
        external_model: the model, or its backbone, is not one of utils/models/, so what its
            forward pass does on the host is unknown.
    """

    device: torch.device
    compiled: bool
    shapes_vary: bool
    scales_loss: bool
    processes: int
    accumulation: int
    capturable: bool
    learns_mixing: bool
    unfreezes: bool
    recomputes: bool
    external_model: bool


class Engine:
    """Computes the optimizer steps. This one, which serves any run, is plain PyTorch: the model is
    called as it is, and TrainStep takes the steps. Others override what differs."""

    def why_not(self, facts: RunFacts) -> str | None:
        """Why it cannot serve the run; None: it can."""
        return None

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        """What the objective calls: `strategy.called`, or what stands in its place. `console`: for
        messages."""
        return strategy.called

    def steps(self, parts: StepParts, loader: Loader, console: Console) -> Steps:
        """Makes the object that takes the optimizer steps. `console`: for messages."""
        return TrainStep(parts)


class Compile(Engine):
    """`--compile`: the model is compiled by torch.compile."""

    def wrap(self, strategy: Strategy, console: Console) -> Callable:
        return Compiled(strategy.called)


class Compiled(nn.Module):
    """`called`, compiled once for texts of any number and length, or for the largest batches of
    pictures. Smaller ones and evaluation take `called` as it is, to save further compilations."""

    def __init__(self, called: nn.Module):
        super().__init__()
        self.called, self.samples = called, 0  # samples: of the largest batch so far
        self.of_pictures = torch.compile(called)
        self.of_texts = torch.compile(called, dynamic=True)

    def forward(self, inputs, *mix_plan) -> Tensor:
        function = self.of_texts
        if isinstance(inputs, Tensor):
            function = self.of_pictures if len(inputs) >= self.samples else self.called
            self.samples = max(self.samples, len(inputs))
        return (function if self.training else self.called)(inputs, *mix_plan)


class CudaGraphs(Engine):
    """`--cuda_graphs`: a whole optimizer step as one CUDA graph, captured once and replayed, for
    steps that are all alike and in which the host decides nothing.

    Args:
        asked: the user has asked for graphs; otherwise they are used only if steps are
            launch-bound.
    """

    def __init__(self, asked: bool = False):
        self.asked = asked

    def why_not(self, facts: RunFacts) -> str | None:
        if facts.device.type != "cuda":
            return "there is no GPU"
        if facts.compiled:
            return "--compile makes kernels of its own"
        if facts.shapes_vary:
            return "batches differ in shape, by --batch_tokens or --image_size_schedule"
        if facts.scales_loss:
            return "the loss scaler of fp16 decides on the host; take --precision bf16"
        if facts.processes > 1:
            return "there are several processes"
        if facts.accumulation > 1:
            return "gradients are accumulated over several batches"
        if not facts.capturable:
            names = " or ".join(name for name, entry in OPTIMIZERS.items() if entry.capturable)
            return f"the optimizer counts on the host; take --optimizer {names}, no --lookahead_k"
        if facts.learns_mixing:
            return "--meta_form sample learns from every batch; take --meta_form policy"
        if facts.unfreezes:
            return "--unfreeze_epoch changes what is trained"
        if facts.recomputes:
            return "--grad_checkpointing handles random states on the host"
        if facts.external_model and not self.asked:
            return "a model from elsewhere may decide something on the host"
        return None

    def steps(self, parts: StepParts, loader: Loader, console: Console) -> GraphedStep:
        recorder = CudaRecorder(parts.precision.device)
        return GraphedStep(parts, loader, console, recorder, self.asked)


# By their choice of `--engine`.
OTHERS = {"ort": "utils.engines.ort.module:Ort"}


def choose_engine(
    facts: RunFacts, *, engine: str = "torch", cuda_graphs: str, deterministic: bool
) -> tuple[Engine, list[str]]:
    """The engine that serves a run, and a line if CUDA graphs were asked for and cannot.

    Args:
        engine: "torch": one of PyTorch's, by the other arguments; else a name in OTHERS.
        cuda_graphs: "on": used if possible, else a line says why not; "auto": used only where they
            save time, else no line; "off".
        deterministic: two runs must use graphs for the same steps, so "auto" does not use any.

    Raises:
        UserError: `engine` cannot serve the run.
    """
    if engine != "torch":
        other = resolve(OTHERS[engine])()
        if (reason := other.why_not(facts)) is not None:
            raise UserError(f"--engine {engine}: {reason}")
        return other, []
    usual = Compile() if facts.compiled else Engine()
    if cuda_graphs == "off" or (cuda_graphs == "auto" and deterministic):
        return usual, []
    graphs = CudaGraphs(asked=cuda_graphs == "on")
    reason = graphs.why_not(facts)
    if reason is None:
        return graphs, []
    return usual, [f"--cuda_graphs: not used, because {reason}"] if graphs.asked else []
