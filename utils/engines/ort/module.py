"""`--engine ort`: the module that computes by ONNX Runtime what a model computes in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...distributed.strategies.base import Strategy
from ...reporting.console import Console
from ..engine import Engine, RunFacts
from . import refusal
from .export import Flat, first_of, kind_of, smaller, tensors_of
from .graph import Graph, refusal_of
from .session import rehearse, why_missing

# Samples of the first batch: those that the graph is traced and tried with, and those on which ONNX
# Runtime and PyTorch are compared with float64. Tracing makes a constant of a number that the model
# computes in Python, such as len(x); a comparison with the traced number would not show that.
TRACED, COMPARED = 16, 8
# ONNX Runtime's error against float64 may be RATIO times PyTorch's, plus NOISE.
RATIO, NOISE = 10, 1e-4
# A gradient that is this small beside the whole one is rounding noise, such as that of a bias
# before a BatchNorm; its error counts relative to this fraction of the whole gradient.
FLOOR = 1e-3
TINY = 1e-30  # in place of a gradient of 0


class Ort(Engine):
    """An Engine for a CPU in float32. utils/settings/engine.py refuses the flags that exclude it;
    OrtModule refuses models that it cannot train."""

    def why_not(self, facts: RunFacts) -> str | None:
        if facts.device.type != "cpu":
            return "it computes on a CPU only: add --device cpu"
        return why_missing()

    def wrap(self, strategy: Strategy, console: Console) -> nn.Module:
        return strategy.substitute(OrtModule(strategy.model, console.say))


class OrtModule(nn.Module):
    """Calls `model`; where gradients are wanted, ONNX Runtime computes it and them.

    The first call of a kind (a mixed batch, another size of pictures, another part that trains)
    exports a graph, tries a step of it in another process, and compares its gradients with
    PyTorch's, by their errors against float64.

    Args:
        model: in float32 on the CPU; its parameters and buffers are used where they are.
        say: called with a line on the comparison.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], None]):
        super().__init__()
        self.model, self.say = model, say
        self._graphs: dict[tuple, Graph] = {}

    def forward(self, inputs, mix_plan=None) -> Tensor:
        """Logits (n, classes).

        Raises:
            UserError: ONNX Runtime cannot train the model.
        """
        plan = () if mix_plan is None else (mix_plan,)
        if not torch.is_grad_enabled():
            return self.model(inputs, *plan)
        arguments = tensors_of(self.model, inputs, mix_plan)
        if not len(arguments["inputs"]):  # a filler: some of ONNX Runtime's operators refuse it
            return self.model(inputs, *plan)
        trained = tuple(parameter.requires_grad for parameter in self.model.parameters())
        modes = tuple(module.training for module in self.model.modules())
        kind = (kind_of(arguments), trained, modes)
        if kind not in self._graphs:
            with torch.random.fork_rng(devices=()):
                self._graphs[kind] = self._tried(first_of(arguments, TRACED))
        return self._graphs[kind].run(self.model, arguments)

    def _tried(self, arguments: dict[str, Tensor]) -> Graph:
        """A graph that works, traced with these arguments, after a line on its gradients."""
        graph = Graph(copy.deepcopy(self.model), arguments)
        rehearse(graph.gradient, [feed.numpy() for feed in graph.feeds(self.model, arguments)])
        plain, steady = without_dropout(copy.deepcopy(self.model)), graph
        if graph.draws:
            steady = Graph(copy.deepcopy(plain), arguments)
        first = smaller(arguments, COMPARED)
        step = f"a step with {len(first['inputs'])} samples"
        if graph.draws:
            step += " without dropout"
        reason = self._compared(steady, plain, first, step)
        if reason:
            # Rounding can put a number on the other side of a ReLU's zero, and so change gradients
            # visibly. A second time, with the samples at the other end, that is not to be expected.
            last = {name: tensor.flip(0) for name, tensor in arguments.items()}
            reason = self._compared(steady, plain, smaller(last, COMPARED), step)
        if reason:
            raise refusal(reason)
        return graph

    def _compared(
        self, graph: Graph, plain: nn.Module, arguments: dict[str, Tensor], step: str
    ) -> str | None:
        """Compares `step` by the graph and by PyTorch with one in float64: says how far they are
        from it, or returns why the graph must not be used. `plain` stays as it is."""
        twin, other, exact = (copy.deepcopy(plain) for _ in range(3))
        exact.double()
        values = list(arguments.values())
        try:
            found = one_step(lambda *_: graph.run(twin, arguments), twin, values)
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise refusal_of(error) from error
        in_float64 = [v.double() if v.is_floating_point() else v for v in values]
        expected = one_step(Flat(exact), exact, in_float64)
        by_pytorch = one_step(Flat(other), other, values)
        errors = [relative_difference(*pair) for pair in zip(found, expected, strict=True)]
        usual = [relative_difference(*pair) for pair in zip(by_pytorch, expected, strict=True)]
        for what, ours, theirs in zip(("gradients", "statistics"), errors, usual, strict=True):
            if not ours <= RATIO * theirs + NOISE:
                return (
                    f"{what} of {step} differ from float64's by {ours:.1e} of their size, and "
                    f"PyTorch's by {theirs:.1e}"
                )
        self.say(
            f"ONNX Runtime: gradients and statistics of {step} are within {max(errors):.1e} of "
            f"float64's (PyTorch's: {max(usual):.1e})"
        )
        return None


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, changed in place: all modules but BatchNorms as in evaluation, so that nothing is
    random."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            module.training = False
    return model


def one_step(
    call: Callable[..., Tensor], model: nn.Module, arguments: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """(the gradients of the cross-entropy with made-up targets, the buffers of floating point after
    the step)

    Args:
        call: arguments -> logits (n, classes), with the parameters and buffers of `model`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = call(*arguments)
    targets = torch.arange(len(logits)) % logits.shape[1]
    found = torch.autograd.grad(F.cross_entropy(logits, targets), trained, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
    return found, [b for b in model.buffers() if b.is_floating_point()]


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """max_i |found_i - expected_i| / max(|expected_i|, FLOOR |expected|), in L2 norms of tensors
    and of all of them together; infinite if anything is not finite."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    sizes = [b.norm().item() for _, b in pairs]
    least = max(FLOOR * math.hypot(*sizes), TINY)
    ratios = [
        (a - b).norm().item() / max(size, least) for (a, b), size in zip(pairs, sizes, strict=True)
    ]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf
