"""A model's graph for ONNX Runtime, with the tensors of the model that it reads and writes."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack

from ...errors import UserError, one_line
from . import refusal
from .export import PREFIX, export
from .session import TrainingSession, import_onnxruntime, with_gradient


class Graph:
    """Computes logits, and in the backward pass the gradients of the parameters.

    Args:
        model: its buffers are changed.
        arguments: of `Flat`; a batch that stands for all others.

    Raises:
        UserError: the model has an operator that ONNX Runtime cannot train.
    """

    def __init__(self, model: nn.Module, arguments: dict[str, Tensor]):
        exported = export(model, arguments)
        self.norms, self.draws = exported.norms, exported.draws
        nodes = exported.proto.graph.node  # type: ignore[attr-defined]  # onnx has no types
        used = {name for node in nodes for name in node.input}
        parameters = {PREFIX + name: p for name, p in model.named_parameters()}
        parameters = {name: p for name, p in parameters.items() if name in used}
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        further = [name for outputs in exported.norms.values() for name in outputs]
        try:
            self.gradient = with_gradient(exported.proto, list(parameters), trained, further)
            self.session = TrainingSession(self.gradient, torch.get_num_threads())
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise refusal_of(error) from error

    def feeds(self, model: nn.Module, arguments: dict[str, Tensor]) -> list[Tensor]:
        """The inputs of the graph, in its order; contiguous and detached."""
        tensors = {PREFIX + name: tensor for name, tensor in model.named_parameters()}
        # Copies, as ONNX Runtime writes the new statistics of a BatchNorm over the old ones.
        tensors |= {PREFIX + name: tensor.clone() for name, tensor in model.named_buffers()}
        tensors |= arguments
        return [tensors[name].detach().contiguous() for name in self.gradient.feeds]

    def run(self, model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
        """(n, classes): the logits, with the parameters and buffers of `model`, whose BatchNorms
        take the batch into their statistics."""
        if self.draws:
            _seed()
        parameters = dict(model.named_parameters())
        trained = [parameters[name.removeprefix(PREFIX)] for name in self.gradient.trained]
        logits, *statistics = _Step.apply(self, self.feeds(model, arguments), *trained)
        of_each = zip(*(statistics[start::3] for start in range(3)), strict=True)
        for name, (mean, var, size) in zip(self.norms, of_each, strict=True):
            update_statistics(model.get_submodule(name), mean, var, size)
        return logits


class _Step(torch.autograd.Function):
    """(graph, its feeds, the parameters whose gradients it computes) -> the outputs. The parameters
    are among the feeds; as arguments they make autograd ask for their gradients."""

    @staticmethod
    def forward(ctx, graph: Graph, feeds: list[Tensor], *trained: Tensor):
        outputs, ctx.state = graph.session.forward(feeds)
        ctx.graph = graph
        # Copies, because the backward pass uses the memory of the outputs again.
        outputs = tuple(tensor.clone() for tensor in _tensors(outputs))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_):
        gradients = ctx.graph.session.backward(gradient.contiguous(), ctx.state)
        del ctx.state  # which holds the activations
        return None, None, *_tensors(gradients)


def _tensors(vector) -> list[Tensor]:
    """Tensors in the memory of ONNX Runtime's values."""
    return [from_dlpack(vector.dlpack_at(index)) for index in range(len(vector))]


@torch.no_grad()
def update_statistics(module: nn.Module, mean: Tensor, var: Tensor, size: Tensor) -> None:
    """Puts a step's statistics into a BatchNorm.

    ONNX takes the biased variance v of the batch, over n values of a channel, into the running one,
    (1 - m) r + m v. PyTorch takes the unbiased one, n / (n - 1) v.

    Args:
        mean, var: (channels,), the running statistics by ONNX Runtime.
        size: () int64, of the BatchNorm's input.
    """
    count = (size // len(mean)).double()
    old = (1 - module.momentum) * module.running_var
    module.running_mean.copy_(mean)
    module.running_var.copy_(old + (var - old) * (count / (count - 1).clamp(min=1)))
    module.num_batches_tracked += 1


def _seed() -> None:
    """Seeds ONNX Runtime's dropout from PyTorch's generator, whose state checkpoints hold."""
    onnxruntime, _ = import_onnxruntime()
    onnxruntime.set_seed(int(torch.randint(2**31 - 1, ())))


def refusal_of(error: Exception) -> UserError:
    """What ONNX Runtime has said, with the operator's name where that is the point."""
    text = one_line(error)
    reason = f"cannot train this model ({text[-200:]})"
    if found := re.search(r"gradient builder has not been registered: *(\w+)", text):
        reason = f"has no gradient of the ONNX operator {found[1]}"
    elif found := re.search(r"Could not find an implementation for (\w+)", text):
        reason = f"cannot compute the ONNX operator {found[1]}"
    return refusal(f"ONNX Runtime {reason}")
