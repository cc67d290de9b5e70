"""Export to ONNX. The graph is checked before the file gets its final name."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.engines.ort.session import import_onnxruntime
from utils.errors import UserError
from utils.files import written_aside
from utils.inference.export_samples import (
    SAMPLES,
    PictureSamples,
    TextSamples,
    metadata_of,
    plain_copy,
    samples_for,
)
from utils.inference.onnx_session import OnnxSession, one_line
from utils.machine.packages import silenced
from utils.weights.card import ModelCard, TextCard

# Largest differences in float32 between PyTorch and another engine: of probabilities, and of their
# logarithms, which alone show a difference where the model is certain of one class.
TOLERANCE, LOG_TOLERANCE = 1e-4, 0.1
# The most that a protocol buffer holds; ONNX keeps larger weights in a second file.
ONNX_BYTES = 2_000_000_000
# Ten seconds of onnx.reference, which computes about 5e9 multiply-adds per second.
REFERENCE_MULTIPLY_ADDS = 50_000_000_000
_OTHER_WAY = "export to safetensors, or try other versions of torch, onnx and onnxscript"


def export_onnx(
    model: nn.Module,
    card: ModelCard | TextCard,
    path: str | Path,
    architecture: str = "",
    weights: str = "",
) -> str:
    """Writes a graph of normalisation (of pictures), model and softmax, in float32.

    Input for pictures, "images": (batch, height, width, channels) uint8, as decoders return them.
    Input for texts, "ids": (batch, length) int64, up to `max_len` tokens: the class token first,
    the tokenizer's padding at the end. Output "probabilities": (batch, classes) float32. The batch
    may have any size. The metadata holds `architecture`, `weights` and, as JSON, `classes` with
    `mean`, `std` and `form` (pictures) or with `max_len`, `clean`, `line_end`, `pad_id`,
    `pad_token` and `cls_id` (texts).

    `onnx.checker` checks the graph. ONNX Runtime where it is installed, else onnx.reference for a
    small model, computes probabilities of random inputs, which are compared with PyTorch's.

    Returns:
        the outcome of these checks, in one line.

    Raises:
        UserError: a package is missing, the model has no ONNX form or is too large, the file
            cannot be written, or a check fails.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise UserError(f"{path}: the name of the file must end in .onnx")
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError:
        raise UserError(
            "exporting to ONNX needs two more packages: pip install onnx onnxscript"
        ) from None
    model = traceable(model, "export a smaller model, or to safetensors")
    samples = samples_for(card)
    proto = trace(model, samples)
    metadata = {key: json.dumps(value) for key, value in metadata_of(card).items()}
    onnx.helper.set_model_props(
        proto, metadata | {"architecture": architecture, "weights": weights}
    )
    random = samples.random()
    with torch.inference_mode():
        expected = model(samples.prepared(random)).softmax(1).numpy()
    with written_aside(path) as aside:
        aside.write_bytes(proto.SerializeToString())
        try:
            onnx.checker.check_model(str(aside), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UserError(f"{path}: {one_line(error)}: {_OTHER_WAY}") from error
        probabilities, engine = _answers(proto, model, samples, random)
        if probabilities is None:
            return f"graph valid; {engine}"
        difference = float(np.abs(probabilities - expected).max())
        if not close(probabilities, expected):
            raise UserError(
                f"{path}: the probabilities of {engine}, or their logarithms, differ too much from "
                f"PyTorch's (by {difference:.1e}); no file is left: {_OTHER_WAY}"
            )
    return (
        f"graph valid; on {SAMPLES} random {samples.what} {engine} is within {difference:.1e} of "
        "PyTorch's probabilities"
    )


def traceable(model: nn.Module, other_way: str) -> nn.Module:
    """A copy of the model for `trace`.

    Raises:
        UserError: it is too large for ONNX; the message ends with `other_way`.
    """
    model = plain_copy(model).to(memory_format=torch.contiguous_format)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > ONNX_BYTES:
        raise UserError(
            f"the weights take {size / 1e9:.1f} GB, and an ONNX file holds 2 GB: {other_way}"
        )
    return model


def trace(model: nn.Module, samples):
    """The ONNX model, without the source paths and lines that the exporter writes into it.

    Args:
        model: as `traceable` returns it.
        samples: PictureSamples, TextSamples, or what has the same name, output, graph, example and
            dynamic_shapes.

    Raises:
        UserError: the model has no ONNX form.
    """
    # The exporter fails on the CPU's kernel for attention with a mask: its strides differ.
    try:
        with silenced(), sdpa_kernel(SDPBackend.MATH):
            program = torch.onnx.export(
                samples.graph(model).eval(),
                (samples.example(),),
                dynamo=True,
                verbose=False,
                input_names=[samples.name],
                output_names=[samples.output],
                dynamic_shapes=(samples.dynamic_shapes(),),
            )
            proto = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise UserError(f"this model cannot be exported to ONNX ({one_line(error)})") from error
    graph = proto.graph
    for part in [graph, *graph.node, *graph.value_info, *graph.input, *graph.output]:
        del part.metadata_props[:]
        part.doc_string = ""
    for initializer in graph.initializer:
        del initializer.metadata_props[:]
    return proto


def _answers(
    proto, model: nn.Module, samples: PictureSamples | TextSamples, inputs: np.ndarray
) -> tuple[np.ndarray | None, str]:
    """(probabilities from another engine, its name), or (None, why it did not run)."""
    try:
        import_onnxruntime()
    except ImportError:
        cost = multiply_adds(model, samples.prepared(inputs))
        if cost > REFERENCE_MULTIPLY_ADDS:
            return None, "not run: pip install onnxruntime to have its answers compared"
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(proto).run(None, {samples.name: inputs})[0], "onnx.reference"
    session = OnnxSession(proto, _OTHER_WAY)
    return session.run(inputs), session.engine


def close(probabilities: np.ndarray, expected: np.ndarray) -> bool:
    """Whether probabilities and their logarithms are within the tolerances; NaN is not."""
    large = expected > 1e-30  # smaller ones are near the end of float32's range
    logarithms = np.log(np.maximum(probabilities[large], 1e-38)) - np.log(expected[large])
    difference = np.abs(probabilities - expected).max()
    return bool(difference < TOLERANCE and np.abs(logarithms).max() < LOG_TOLERANCE)


def multiply_adds(model: nn.Module, inputs: Tensor) -> int:
    """Multiply-adds of convolutions and linear layers for `inputs`."""
    total = 0

    def count(module: nn.Module, _, output: Tensor) -> None:
        nonlocal total
        total += output.numel() * module.weight[0].numel()

    counted = (nn.Conv2d, nn.Linear)
    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, counted)]
    with torch.inference_mode():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return total
