"""A graph that ONNX Runtime computes on the CPU."""

import re

import numpy as np
import torch

from utils.engines.ort.session import import_onnxruntime
from utils.errors import UserError

# How ONNX Runtime names an operator that it cannot compute, or does not know.
_MISSING = re.compile(
    r"implementation for (\w+)|No Op registered for (\w+)|: ?(\w+)\(-?\d+\) is not a"
)


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
            else one_line(error)
        )
        return UserError(f"{self.engine} refuses the graph ({why}): {self.other_way}")


def one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
