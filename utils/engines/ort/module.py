"""The module that computes by ONNX Runtime what a PyTorch model computes in training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from utils.engines.ort.arguments import Flat, first_of, kind_of, smaller, tensors_of
from utils.engines.ort.checks import (
    NOISE,
    RATIO,
    errors_of_step,
    in_float64,
    one_step,
    without_dropout,
)
from utils.engines.ort.graph import Graph, refusal_of
from utils.engines.ort.rehearsal import rehearse
from utils.errors import UserError

# Samples of the first batch: those that the graph is traced and tried with, and those on which ONNX
# Runtime and PyTorch are compared with float64. Tracing makes a constant of a number that the model
# computes in Python, such as len(x); a comparison with the traced number would not show that.
TRACED, COMPARED = 16, 8


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
        graph = Graph.of(copy.deepcopy(self.model), arguments)
        rehearse(graph.gradient, [feed.numpy() for feed in graph.feeds(self.model, arguments)])
        plain, steady = without_dropout(copy.deepcopy(self.model)), graph
        if graph.draws:
            steady = Graph.of(copy.deepcopy(plain), arguments)
        first = smaller(arguments, COMPARED)
        step = f"a step with {len(first['inputs'])} samples"
        if graph.draws:
            step += " without dropout"
        refusal = self._compared(steady, plain, first, step)
        if refusal:
            # Rounding can put a number on the other side of a ReLU's zero, and so change gradients
            # visibly. A second time, with the samples at the other end, that is not to be expected.
            last = {name: tensor.flip(0) for name, tensor in arguments.items()}
            refusal = self._compared(steady, plain, smaller(last, COMPARED), step)
        if refusal:
            raise UserError(f"--engine ort: {refusal}; take --engine torch")
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
        expected = one_step(Flat(exact), exact, [in_float64(value) for value in values])
        errors = errors_of_step(found, expected)
        usual = errors_of_step(one_step(Flat(other), other, values), expected)
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
