"""Models as ONNX graphs in memory, computed by ONNX Runtime: `--engine ort` without training, and
the check of an exported file."""

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engines.ort.session import import_onnxruntime
from ..errors import UserError, one_line
from ..machine.silence import silenced
from ..packed import PackedTokens
from ..plural import counted
from .export_samples import PictureSamples, TextSamples, plain_copy

# Largest differences in float32 between PyTorch and another engine: of probabilities, and of their
# logarithms, which alone show a difference where the model is certain of one class.
TOLERANCE, LOG_TOLERANCE = 1e-4, 0.1
# The most that a protocol buffer holds; ONNX keeps larger weights in a second file.
ONNX_BYTES = 2_000_000_000
# How ONNX Runtime names an operator that it cannot compute, or does not know.
_MISSING = re.compile(
    r"implementation for (\w+)|No Op registered for (\w+)|: ?(\w+)\(-?\d+\) is not a"
)
_WITHOUT_ORT = "leave out --engine ort"


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


def trace(graph: nn.Module, example: Tensor, dynamic_shapes: dict, name: str, output: str):
    """The ONNX model of `graph`, without the source paths and lines that the exporter writes into
    it.

    Args:
        graph: of a model that `traceable` returns.
        example: its input, with two samples.
        dynamic_shapes: {dimension of the input: its torch.export.Dim}, where sizes may differ.
        name, output: of the input and the output.

    Raises:
        UserError: the model has no ONNX form.
    """
    # The exporter fails on the CPU's kernel for attention with a mask: its strides differ.
    try:
        with silenced(), sdpa_kernel(SDPBackend.MATH):
            program = torch.onnx.export(
                graph.eval(),
                (example,),
                dynamo=True,
                verbose=False,
                input_names=[name],
                output_names=[output],
                dynamic_shapes=(dynamic_shapes,),
            )
            proto = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise UserError(
            f"this model cannot be exported to ONNX ({one_line(error, 200)})"
        ) from error
    made = proto.graph
    for part in [made, *made.node, *made.value_info, *made.input, *made.output]:
        del part.metadata_props[:]
        part.doc_string = ""
    for initializer in made.initializer:
        del initializer.metadata_props[:]
    return proto


def close(probabilities: np.ndarray, expected: np.ndarray) -> bool:
    """Whether probabilities and their logarithms are within the tolerances; NaN is not."""
    large = expected > 1e-30  # smaller ones are near the end of float32's range
    logarithms = np.log(np.maximum(probabilities[large], 1e-38)) - np.log(expected[large])
    difference = np.abs(probabilities - expected).max()
    return bool(difference < TOLERANCE and np.abs(logarithms).max() < LOG_TOLERANCE)


class OnnxSession:
    """A graph with one input and one output, and as many threads as PyTorch has now.

    Args:
        proto: the onnx.ModelProto.
        other_way: what the user can do if ONNX Runtime refuses it, for the error.

    Raises:
        UserError: ONNX Runtime cannot compute the graph, or, by `run`, this input.
    """

    def __init__(self, proto, other_way: str):
        onnxruntime, _ = import_onnxruntime()
        self.other_way = other_way
        self.threads = torch.get_num_threads()
        self.engine = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        options.intra_op_num_threads = self.threads
        try:
            self._session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise self._refusal(error) from error
        self._name = self._session.get_inputs()[0].name

    def run(self, inputs: np.ndarray) -> np.ndarray:
        """The output for this input."""
        try:
            return self._session.run(None, {self._name: inputs})[0]
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> UserError:
        missing = _MISSING.search(str(error))
        why = (
            f"it cannot compute the operator {missing[missing.lastindex]} on a CPU"
            if missing
            else one_line(error, 200)
        )
        return UserError(f"{self.engine} refuses the graph ({why}): {self.other_way}")


class OnnxModel(nn.Module):
    """Stands in for a model in evaluation: takes its inputs, and ONNX Runtime computes its logits.

    The model itself computes the first batch, too, and a line says how far the probabilities are
    apart.

    Args:
        model: on the CPU; its weights are copied into the graph.
        samples: of its inputs.
        say: called with that line.

    Raises:
        UserError: the model has no ONNX form, ONNX Runtime cannot compute it or, at the first
            batch, gives other answers than PyTorch.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: PictureSamples | TextSamples,
        say: Callable[[str], None],
    ):
        super().__init__()
        self.model, self.samples, self.say = model, samples, say
        plain = traceable(model, _WITHOUT_ORT)
        try:
            example = samples.prepared(samples.example().numpy()).contiguous()
            proto = trace(plain, example, samples.dynamic_shapes(), "inputs", "logits")
        except UserError as error:
            raise UserError(f"--engine ort: {error}: {_WITHOUT_ORT}") from error
        self.session = OnnxSession(proto, _WITHOUT_ORT)
        self.compared = False

    @torch.inference_mode()
    def forward(self, inputs: Tensor | PackedTokens) -> Tensor:
        """(n, channels, height, width) float32, or texts -> logits (n, classes) float32."""
        tensor: Tensor = inputs
        if isinstance(inputs, PackedTokens):
            assert isinstance(self.samples, TextSamples)
            tensor = inputs.padded(self.samples.pad)
        logits = torch.from_numpy(self.session.run(tensor.contiguous().numpy()))
        if not self.compared:
            self._compare(logits.softmax(1).numpy(), self.model(inputs).softmax(1).numpy())
            self.compared = True
        return logits

    def _compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Compares probabilities (n, classes) with those of PyTorch."""
        session, what = self.session, self.samples.what
        difference = float(np.abs(found - expected).max())
        if not close(found, expected):
            raise UserError(
                f"--engine ort: on the first {len(found):,} {what} the probabilities of "
                f"{session.engine}, or their logarithms, differ too much from PyTorch's (by "
                f"{difference:.1e}; at most {TOLERANCE:.0e}): {_WITHOUT_ORT}, or try another "
                "version of onnxruntime"
            )
        self.say(
            f"{session.engine}, {counted(session.threads, 'thread')}: on the first "
            f"{len(found):,} {what} within {difference:.1e} of PyTorch's probabilities"
        )
