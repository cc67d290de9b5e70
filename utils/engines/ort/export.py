"""A model as an ONNX graph that ONNX Runtime can train, and its arguments as tensors alone."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import one_line
from ...machine.silence import silenced
from ...mixup.mixing import MixPlan
from ...packed import PackedTokens
from . import refusal

OPSET, IR_VERSION = 17, 10  # the newest that ONNX Runtime 1.19 has gradients for, and reads
# Dimensions that may differ from call to call; others are fixed in the graph.
SAMPLES, TEXTS = {0: "batch"}, {0: "batch", 1: "length"}
PREFIX = "model."  # of the names of parameters and buffers in the graph
# Operators that ONNX Runtime would run, and why it must not.
REFUSED = {"AveragePool": "its backward pass would crash the run"} | dict.fromkeys(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
     "RandomUniformLike"),
    "a resumed run could not repeat its random numbers",
)  # fmt: skip


def tensors_of(model: nn.Module, inputs: Tensor | PackedTokens, mix_plan=None) -> dict[str, Tensor]:
    """A model's arguments as a graph has them, {name: tensor}: `inputs`, and with a plan `partner`
    and `lam`. Packed texts become rows of ids, (n, longest) int64, with the model's padding at
    their ends."""
    if isinstance(inputs, PackedTokens):
        inputs = inputs.padded(model.pad)
    tensors = {"inputs": inputs}
    if mix_plan is not None:
        tensors |= {"partner": mix_plan.partner, "lam": mix_plan.lam}
    return tensors


def first_of(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The arguments of the first samples; each gets the next one as its partner."""
    tensors = {name: tensor[:count] for name, tensor in tensors.items()}
    if "partner" in tensors:
        tensors["partner"] = torch.arange(len(tensors["partner"])).roll(-1)
    return tensors


def smaller(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The arguments of at most `count` samples, fewer than there are, and texts without their last
    token: each dimension of `varying` is smaller. It leaves two samples, since a BatchNorm may need
    them, and a token."""
    tensors = first_of(tensors, max(2, min(count, len(tensors["inputs"]) - 1)))
    inputs = tensors["inputs"]
    if not inputs.is_floating_point() and inputs.shape[1] > 1:
        tensors["inputs"] = inputs[:, :-1]
    return tensors


def kind_of(tensors: dict[str, Tensor]) -> tuple:
    """Equal for arguments that the same graph can take."""
    inputs = tensors["inputs"]
    size = inputs.shape[1:] if inputs.is_floating_point() else ()
    return tuple(tensors), inputs.dtype, size


def varying(tensors: dict[str, Tensor]) -> dict[str, dict[int, str]]:
    """The dimensions of these arguments that may differ from call to call."""
    texts = not tensors["inputs"].is_floating_point()
    return {name: TEXTS if texts and name == "inputs" else SAMPLES for name in tensors}


class Flat(nn.Module):
    """The model as a function of the tensors of `tensors_of`, one by one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, partner: Tensor | None = None, lam: Tensor | None = None):
        if partner is None:
            return self.model(inputs)
        return self.model(inputs, MixPlan(partner, lam))


class Exported(NamedTuple):
    """A model as a graph: arguments, parameters, buffers -> logits.

    Attributes:
        proto: an onnx.ModelProto.
        norms: {name of a BatchNorm whose statistics a step changes: names in the graph of the new
            running mean and variance, and of the size of its input}.
        draws: it has dropout.
    """

    proto: object
    norms: dict[str, list[str]]
    draws: bool


def export(model: nn.Module, arguments: dict[str, Tensor]) -> Exported:
    """Traces a model, each of its modules in the mode that it is in.

    Args:
        model: its buffers are changed.
        arguments: of `Flat`; a batch that stands for all others.

    Raises:
        UserError: it has no graph, or one with an operator that must not be run.
    """
    import onnx

    file, dynamic = io.BytesIO(), varying(arguments)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # C++ code prints the graph that it cannot export, past Python's stdout. Its only switch is the
    # private function that does so, which a later PyTorch may not have.
    unprinted = mock.patch.object(torch._C, "_jit_onnx_log", create=True)
    try:
        with silenced(), unprinted, _norms_prepared(model):
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
        raise refusal(f"this model has no ONNX graph ({one_line(error, 200)})") from error
    _refuse_changed_buffers(model, before)
    proto = onnx.load_model_from_string(file.getvalue())
    proto.ir_version = min(proto.ir_version, IR_VERSION)
    operators = {node.op_type for node in proto.graph.node}
    for operator, reason in REFUSED.items():
        if operator in operators:
            raise refusal(f"this model has the ONNX operator {operator}: {reason}")
    _complete_layer_norms(proto)
    return Exported(proto, _norms_of(proto), _use_dropout(proto))


def _refuse_changed_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raises UserError if a buffer that is not a BatchNorm's has changed since `before`: the graph
    has no output that could change it in training."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, buffer in model.named_buffers():
        of_norm = name.rpartition(".")[0] in norms
        if not of_norm and not torch.equal(buffer, before.get(name, buffer)):
            raise refusal(
                f"this model changes its buffer {name} in training, which ONNX Runtime would not do"
            )


@contextlib.contextmanager
def _norms_prepared(model: nn.Module) -> Iterator[None]:
    """Within it the BatchNorms that the graph could not follow raise ValueError, and those in
    evaluation mode compute by plain arithmetic, because ONNX Runtime would have every BatchNorm
    take statistics of the batch. Their modules stay as they are, since some compute more, as timm's
    with an activation."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    called: set[str] = set()
    hooks = [m.register_forward_pre_hook(_norm_checked(n, called)) for n, m in norms.items()]
    plain = F.batch_norm

    def batch_norm(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if training:
            return plain(x, mean, var, weight, bias, training, momentum, eps)
        return by_running_statistics(x, mean, var, weight, bias, eps)

    try:
        with mock.patch.object(F, "batch_norm", batch_norm):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def by_running_statistics(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """What a BatchNorm computes in evaluation.

    Args:
        x: (n, channels, ...).
        mean, var, weight, bias: (channels,).
    """
    factor = 1 / torch.sqrt(var + eps)
    if weight is not None:
        factor = factor * weight
    shift = (0.0 if bias is None else bias) - mean * factor
    shape = (-1, *(1,) * (x.ndim - 2))
    return x * factor.view(shape) + shift.view(shape)


def _norm_checked(name: str, called: set[str]):
    """A hook that raises ValueError at a call of a BatchNorm that the graph could not follow.

    Args:
        called: the names of those that have been called in training mode.
    """

    def check(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if module.running_mean is None:
            raise ValueError(f"the BatchNorm {name} has no running statistics")
        if not module.training:
            return
        if module.momentum is None:
            raise ValueError(f"the BatchNorm {name} has no momentum")
        if name in called:
            raise ValueError(f"the BatchNorm {name} is called twice in a step")
        called.add(name)

    return check


def _norms_of(proto) -> dict[str, list[str]]:
    """`Exported.norms`: those that take statistics of the batch. Adds the sizes of their inputs to
    the graph, in place."""
    import onnx

    norms, sizes = {}, []
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) == 3:
            name = node.input[3].removeprefix(PREFIX).removesuffix(".running_mean")
            norms[name] = [*node.output[1:], f"{node.output[0]}_size"]
            sizes.append(onnx.helper.make_node("Size", node.input[:1], norms[name][2:]))
    proto.graph.node.extend(sizes)
    return norms


def _complete_layer_norms(proto) -> None:
    """Adds the outputs of LayerNorms that their gradient reads, in place."""
    for node in proto.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}_{name}" for name in ("mean", "inverse_deviation"))


def _use_dropout(proto) -> bool:
    """Takes out dropout with a rate of 0, in place; whether there is other dropout.

    Raises:
        UserError: some is there only in name, since it is in evaluation mode.
    """
    import onnx

    nodes = proto.graph.node
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    draws = False
    for node in nodes:
        if node.op_type != "Dropout":
            continue
        if len(node.input) < 3:
            raise refusal(
                "this model calls scaled_dot_product_attention with dropout, which its ONNX graph "
                "would leave out"
            )
        rate = onnx.numpy_helper.to_array(constants[node.input[1]].attribute[0].t)
        if rate > 0:
            draws = True
        else:
            del node.input[1:], node.output[1:]
            node.op_type = "Identity"
    return draws
