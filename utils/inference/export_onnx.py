"""A trained model as an ONNX graph, checked before its file takes its name."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.files import written_aside
from utils.inference.export_samples import (
    SAMPLES,
    PictureSamples,
    TextSamples,
    plain_copy,
    samples_for,
)
from utils.weights.card import ModelCard, TextCard

# Between PyTorch and another engine in float32: of probabilities, and of their logarithms, where a
# model that is certain of one class shows its differences.
TOLERANCE, LOG_TOLERANCE = 1e-4, 0.1
# What a protocol buffer can hold; beyond it ONNX keeps the weights in a second file.
ONNX_BYTES = 2_000_000_000
# onnx.reference does some 5e9 multiply-adds in a second; it is asked for ten seconds at most.
REFERENCE_MULTIPLY_ADDS = 50_000_000_000
_OTHER_WAY = "export to safetensors, or try other versions of torch, onnx and onnxscript"


def export_onnx(
    model: nn.Module, card: ModelCard | TextCard, path: str | Path, architecture: str = ""
) -> str:
    """Writes a graph that needs nothing else: normalisation, model and softmax in float32.

    Input of a model of pictures, "images": (batch, height, width, channels) uint8, as decoders
    give them; of a model of texts, "ids": (batch, length) int64, the class token first, padded at
    the end with the tokenizer's padding, up to `max_len` tokens. Output "probabilities": (batch,
    classes) float32. The batch is of any size. The metadata holds `classes`, `mean` and `std`, or
    `classes`, `max_len` and `clean`, as JSON, and `architecture`.

    Returns what was checked: the graph, by `onnx.checker`, and its answers to random inputs
    compared with PyTorch's, by ONNX Runtime where that is installed.

    Raises:
        UserError: a package is missing, the model cannot be expressed, its file cannot be
            written, or another engine does not get the same probabilities from it.
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
    model = plain_copy(model).to(memory_format=torch.contiguous_format)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > ONNX_BYTES:
        raise UserError(
            f"the weights take {size / 1e9:.1f} GB, and an ONNX file holds 2 GB: export a smaller "
            "model, or to safetensors"
        )
    samples = samples_for(card)
    proto = trace(model, samples)
    metadata = {key: json.dumps(card.to_dict()[key]) for key in samples.metadata}
    onnx.helper.set_model_props(proto, metadata | {"architecture": architecture})
    random = samples.random()
    with torch.inference_mode():
        expected = model(samples.prepared(random)).softmax(1).numpy()
    with written_aside(path) as aside:
        aside.write_bytes(proto.SerializeToString())
        try:
            onnx.checker.check_model(str(aside), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UserError(f"{path}: {_one_line(error)}: {_OTHER_WAY}") from error
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


def trace(model: nn.Module, samples: PictureSamples | TextSamples):
    """The ONNX model, without the paths and lines of source that the exporter leaves in it."""
    try:
        with _silence():
            program = torch.onnx.export(
                samples.graph(model).eval(),
                (samples.example(),),
                dynamo=True,
                verbose=False,
                input_names=[samples.name],
                output_names=["probabilities"],
                dynamic_shapes=(samples.dynamic_shapes(),),
            )
            proto = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise UserError(f"this model cannot be exported to ONNX ({_one_line(error)})") from error
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
    """Probabilities by another engine and its name, or None and why there are none."""
    try:
        import onnxruntime
    except ImportError:
        cost = multiply_adds(model, samples.prepared(inputs))
        if cost > REFERENCE_MULTIPLY_ADDS:
            return None, "not run: pip install onnxruntime to have its answers compared"
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(proto).run(None, {samples.name: inputs})[0], "onnx.reference"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        probabilities = session.run(None, {samples.name: inputs})[0]
    except Exception as error:  # its exceptions have no public base
        raise UserError(
            f"ONNX Runtime refuses the graph ({_one_line(error)}): {_OTHER_WAY}"
        ) from error
    return probabilities, f"ONNX Runtime {onnxruntime.__version__}"


def close(probabilities: np.ndarray, expected: np.ndarray) -> bool:
    """Both within the tolerances; not if one of them is not a number."""
    large = expected > 1e-30  # the others are at the end of float32's range
    logarithms = np.log(np.maximum(probabilities[large], 1e-38)) - np.log(expected[large])
    difference = np.abs(probabilities - expected).max()
    return bool(difference < TOLERANCE and np.abs(logarithms).max() < LOG_TOLERANCE)


def multiply_adds(model: nn.Module, inputs: Tensor) -> int:
    """Of convolutions and linear layers, for these inputs."""
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


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without the warnings, log lines and progress of the exporter, which concern its authors."""
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


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
