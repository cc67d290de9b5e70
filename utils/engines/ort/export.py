"""A model as an ONNX graph that ONNX Runtime can train."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.engines.ort.arguments import Flat, varying
from utils.errors import UserError

OPSET, IR_VERSION = 17, 10  # the newest that ONNX Runtime 1.19 has gradients for, and reads
PREFIX = "model."  # of the names of parameters and buffers in the graph
# Operators that ONNX Runtime would run, and why it must not.
REFUSED = {"AveragePool": "its backward pass would crash the run"} | dict.fromkeys(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
     "RandomUniformLike"),
    "a resumed run could not repeat its random numbers",
)  # fmt: skip


class Norm(NamedTuple):
    """A BatchNorm whose statistics a step changes."""

    name: str  # of the module
    values: int  # of a channel in each sample
    outputs: list[str]  # names of the new running mean and variance in the graph


class Exported(NamedTuple):
    """A model as a graph: arguments, parameters, buffers -> logits."""

    proto: object  # onnx.ModelProto
    norms: list[Norm]
    draws: bool  # it has dropout


def export(model: nn.Module, arguments: dict[str, Tensor]) -> Exported:
    """Traces a model, each of its modules in the mode that it is in.

    Args:
        model: its buffers are changed.
        arguments: of `Flat`; a batch that stands for all others.

    Raises:
        UserError: it has no graph, or one with an operator that must not be run.
    """
    import onnx

    file, sizes = io.BytesIO(), {}
    dynamic = varying(arguments)
    try:
        with _silence(), _norms_prepared(model, sizes):
            torch.onnx.export(
                Flat(model),
                tuple(arguments.values()),
                file,
                dynamo=False,
                input_names=list(arguments),
                output_names=["logits"],
                dynamic_axes=dynamic | {"logits": {0: "batch"}},
                opset_version=OPSET,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                export_params=False,
                keep_initializers_as_inputs=True,
            )
    except Exception as error:  # of many classes
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"--engine ort: this model has no ONNX graph ({text}); take --engine torch"
        ) from error
    proto = onnx.load_model_from_string(file.getvalue())
    proto.ir_version = min(proto.ir_version, IR_VERSION)
    operators = {node.op_type for node in proto.graph.node}
    for operator, reason in REFUSED.items():
        if operator in operators:
            raise UserError(
                f"--engine ort: this model has the ONNX operator {operator}: {reason}; take "
                "--engine torch"
            )
    _complete_layer_norms(proto)
    return Exported(proto, _norms_of(proto, sizes), _use_dropout(proto))


@contextlib.contextmanager
def _norms_prepared(model: nn.Module, sizes: dict[str, int]) -> Iterator[None]:
    """Within it each BatchNorm that takes statistics of the batch notes its `Norm.values` in
    `sizes` when it is called; the others compute by plain arithmetic, because ONNX Runtime would
    have every BatchNorm take statistics of the batch."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    hooks = [
        module.register_forward_pre_hook(_size_noted(name, sizes))
        for name, module in norms.items()
        if module.training
    ]
    fixed = [module for module in norms.values() if not module.training]
    for module in fixed:
        module.forward = functools.partial(by_running_statistics, module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in fixed:
            del module.forward


def by_running_statistics(norm: nn.Module, x: Tensor) -> Tensor:
    """What a BatchNorm computes in evaluation, (n, channels, ...)."""
    factor, bias = 1 / torch.sqrt(norm.running_var + norm.eps), 0.0
    if norm.affine:
        factor, bias = factor * norm.weight, norm.bias
    shift = bias - norm.running_mean * factor
    shape = (-1, *(1,) * (x.ndim - 2))
    return x * factor.view(shape) + shift.view(shape)


def _size_noted(name: str, sizes: dict[str, int]):
    """A hook that notes how many values of a channel each sample of a BatchNorm has."""

    def note(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if name in sizes:
            raise ValueError(f"the BatchNorm {name} is called twice in a step")
        if module.momentum is None or module.running_mean is None:
            raise ValueError(f"the BatchNorm {name} has no momentum or no running statistics")
        sizes[name] = math.prod(int(size) for size in inputs[0].shape[2:])

    return note


def _norms_of(proto, sizes: dict[str, int]) -> list[Norm]:
    """The BatchNorms that take statistics of the batch; `sizes`: `Norm.values` of each."""
    norms = []
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) == 3:
            name = node.input[3].removeprefix(PREFIX).removesuffix(".running_mean")
            norms.append(Norm(name, sizes[name], list(node.output[1:])))
    return norms


def _complete_layer_norms(proto) -> None:
    """Adds the outputs of LayerNorms that their gradient reads, in place."""
    for node in proto.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}_{name}" for name in ("mean", "inverse_deviation"))


def _use_dropout(proto) -> bool:
    """Takes out dropout with a rate of 0, in place; whether there is other dropout."""
    import onnx

    nodes = proto.graph.node
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    draws = False
    for node in nodes:
        if node.op_type != "Dropout":
            continue
        rate = onnx.numpy_helper.to_array(constants[node.input[1]].attribute[0].t)
        if rate > 0:
            draws = True
        else:
            del node.input[1:], node.output[1:]
            node.op_type = "Identity"
    return draws


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hides the exporter's warnings, log lines and graphs, which are for its developers."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
