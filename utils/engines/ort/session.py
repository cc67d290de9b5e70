"""A graph with its gradient, the session of ONNX Runtime that runs it, and its rehearsal.

`C` is ONNX Runtime's module of C++ functions, on which its ORTModule is built. ORTModule itself
does not work with today's PyTorch. Nothing here imports PyTorch, so a rehearsal starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...errors import UserError
from ...place import python_path
from . import refusal

GRAPH, FEEDS, NAMES = "graph.onnx", "feeds.safetensors", "names.json"
PATIENCE = 600  # seconds for a rehearsal, which takes a few of them

# Log levels: without warnings, and without errors too, which exceptions tell.
ERRORS, FATAL = 3, 4
INSTALL = (
    "install requirements-ort.txt into an environment of its own (onnxruntime without the training "
    "core would write into the same folder), or take --engine torch"
)


def import_onnxruntime():
    """(the package onnxruntime, its C++ functions). It would import ORTModule, which imports
    PyTorch and looks for CUDA, but does without it."""
    sys.modules.setdefault("onnxruntime.training.ortmodule", None)  # type: ignore[arg-type]  # bars it
    import onnxruntime
    from onnxruntime.capi import _pybind_state

    return onnxruntime, _pybind_state


def why_missing() -> str | None:
    """Why there is no training core; None: there is one."""
    try:
        import onnx  # noqa: F401

        _, C = import_onnxruntime()
    except ImportError as error:
        return f"{error.name or 'onnxruntime'} is not installed: {INSTALL}"
    if not hasattr(C, "TrainingAgent"):
        return f"the installed onnxruntime has no training core: {INSTALL}"
    return None


@dataclass(frozen=True)
class GradientGraph:
    """A graph that computes outputs, and then gradients from those of its outputs.

    Attributes:
        proto: the graph as ONNX, serialized.
        feeds: names of its inputs, in order.
        outputs: how many outputs it has.
        trained: names of the inputs whose gradients it computes, in the order of these.
    """

    proto: bytes
    feeds: list[str]
    outputs: int
    trained: list[str]


def with_gradient(
    proto, parameters: list[str], trained: list[str], further: list[str]
) -> GradientGraph:
    """Adds the gradient of its one output to a graph.

    Args:
        proto: an onnx.ModelProto whose inputs include the parameters.
        parameters: names of the inputs that are parameters.
        trained: names of those whose gradients are wanted.
        further: names of values within the graph that become outputs without a gradient.

    Raises:
        RuntimeError: an operator has no gradient.
    """
    import onnx

    _, C = import_onnxruntime()
    C.set_default_logger_severity(ERRORS)
    settings = C.OrtModuleGraphBuilderConfiguration()
    settings.initializer_names = parameters
    settings.initializer_names_to_train = trained
    settings.input_names_require_grad = []
    settings.build_gradient_graph = True
    settings.loglevel = C.Severity.ERROR
    builder = C.OrtModuleGraphBuilder()
    builder.initialize(proto.SerializeToString(), settings)
    builder.build(C.TrainingGraphTransformerConfiguration())
    built = onnx.load_model_from_string(builder.get_gradient_model())
    graph = built.graph
    if further:
        # The operator that gives the outputs and takes their gradients. Were these outputs before,
        # ONNX Runtime would want a gradient of each.
        border = next(node for node in graph.node if node.op_type == "YieldOp")
        border.input.extend(further)
        indices = range(1, len(border.input))
        border.attribute.append(onnx.helper.make_attribute("non_differentiable_outputs", indices))
    return GradientGraph(
        proto=built.SerializeToString(),
        feeds=[each.name for each in graph.input],
        outputs=1 + len(further),
        trained=[each.name.removesuffix("_grad") for each in graph.output],
    )


class TrainingSession:
    """Runs a GradientGraph on the CPU.

    Args:
        graph: with the gradient of its first output.
        threads: for arithmetic.

    Raises:
        Exception: an operator has no kernel; ONNX Runtime's exceptions have no public base class.
    """

    def __init__(self, graph: GradientGraph, threads: int):
        onnxruntime, C = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = FATAL
        options.intra_op_num_threads = threads
        options.use_deterministic_compute = True
        # The outputs are read while the rest of the graph has yet to run, so nothing may take
        # their memory.
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Idle threads would take the cores from PyTorch, which computes the rest of the step.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            graph.proto, options, providers=["CPUExecutionProvider"]
        )
        device = C.OrtDevice(C.OrtDevice.cpu(), C.OrtDevice.default_memory(), 0)
        fetches = [each.name for each in self.session.get_outputs()]
        self.agent = C.TrainingAgent(
            self.session._sess, graph.feeds, [device] * graph.outputs, fetches,
            [device] * len(fetches), 0,
        )  # fmt: skip

    def forward(self, feeds: Sequence):
        """(outputs, a state for `backward`). The outputs are valid until then.

        Args:
            feeds: contiguous arrays of NumPy or detached tensors of PyTorch, for `graph.feeds`.
                ONNX Runtime may write to the running statistics of BatchNorms.
        """
        _, C = import_onnxruntime()
        state, outputs = C.PartialGraphExecutionState(), C.OrtValueVector()
        self.agent.run_forward(_vector(feeds), outputs, state, None)
        return outputs, state

    def backward(self, gradient, state):
        """The vector of gradients with respect to `graph.trained`, from that of the first
        output."""
        _, C = import_onnxruntime()
        gradients = C.OrtValueVector()
        self.agent.run_backward(_vector([gradient]), gradients, state)
        return gradients


def _vector(arrays: Sequence):
    """ONNX Runtime's vector of values, in the arrays' memory."""
    _, C = import_onnxruntime()
    vector = C.OrtValueVector()
    vector.reserve(len(arrays))
    for array in arrays:
        vector.push_back(array.__dlpack__(), str(array.dtype).endswith("bool"))
    return vector


def rehearse(graph: GradientGraph, feeds: list[np.ndarray]) -> None:
    """Runs the graph once, forward and backward, in another process: this file, as a program.

    Some operators end their process. A division by zero in C++ raises no exception: the operating
    system ends the process. Where that happens, the run is refused before its first step.

    Args:
        feeds: the inputs, contiguous, in the graph's order.

    Raises:
        UserError: that process did not survive, or did not end; or there is no space for its input.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
            folder, names = Path(name), asdict(graph)
            (folder / GRAPH).write_bytes(names.pop("proto"))
            (folder / NAMES).write_text(json.dumps(names), encoding="utf-8")
            save_file(dict(zip(graph.feeds, feeds, strict=True)), folder / FEEDS)
            child = subprocess.run(
                [sys.executable, "-P", "-m", __name__, name],
                env=os.environ | python_path() | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
    except subprocess.TimeoutExpired:  # which has killed it
        code, how = None, f"had not ended after {PATIENCE} seconds"
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--engine ort: its graph cannot be written to a temporary folder: {error}; free some "
            "space there, or set TMPDIR to another folder"
        ) from error
    else:
        code, message = child.returncode, child.stderr.strip() or "without a message"
        how = f"failed ({message.splitlines()[-1][:200]})"
    if code in (0, -signal.SIGINT, -signal.SIGTERM):  # a signal stops the run itself
        return
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    raise refusal(
        "ONNX Runtime cannot train this model: another process, in which a step was tried, " + how
    )


def run(folder: Path) -> None:
    """Takes the step, in the other process."""
    names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
    session = TrainingSession(GradientGraph((folder / GRAPH).read_bytes(), **names), threads=1)
    feeds = load_file(folder / FEEDS)
    # Copies, because what is read from the file cannot be written to.
    outputs, state = session.forward([feeds[name].copy() for name in names["feeds"]])
    session.backward(np.ones_like(outputs[0].numpy()), state)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
