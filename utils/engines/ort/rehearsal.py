"""A step of ONNX Runtime in a process of its own, because some operators end the process.

A division by zero in C++ raises no exception: the operating system ends the process. `rehearse`
starts this file as a program; where that dies, the run is refused before its first step.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from utils.engines.ort.session import GradientGraph, TrainingSession
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
GRAPH, FEEDS, NAMES = "graph.onnx", "feeds.safetensors", "names.json"
PATIENCE = 600  # seconds; it takes a few of them


def rehearse(graph: GradientGraph, feeds: list[np.ndarray]) -> None:
    """Runs the graph once, forward and backward, in another process.

    Args:
        feeds: the inputs, contiguous, in the graph's order.

    Raises:
        UserError: that process did not survive, or did not end; or there is no space for its input.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
            _write(Path(name), graph, feeds)
            child = subprocess.run(
                [sys.executable, "-m", "utils.engines.ort.rehearsal", name],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
    except subprocess.TimeoutExpired:  # which has killed it
        raise _refusal(f"had not ended after {PATIENCE} seconds") from None
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--engine ort: its graph cannot be written to a temporary folder: {error}; free some "
            "space there, or set TMPDIR to another folder"
        ) from error
    if child.returncode in (0, -signal.SIGINT, -signal.SIGTERM):  # a signal stops the run itself
        return
    if child.returncode < 0:
        how = f"was ended by {signal.Signals(-child.returncode).name}"
    else:
        last = (child.stderr.strip() or "without a message").splitlines()[-1]
        how = f"failed ({last[:200]})"
    raise _refusal(how)


def _write(folder: Path, graph: GradientGraph, feeds: list[np.ndarray]) -> None:
    """Writes what `run` reads."""
    (folder / GRAPH).write_bytes(graph.proto)
    save_file(dict(zip(graph.feeds, feeds, strict=True)), folder / FEEDS)
    names = {"feeds": graph.feeds, "outputs": graph.outputs, "trained": graph.trained}
    (folder / NAMES).write_text(json.dumps(names), encoding="utf-8")


def _refusal(how: str) -> UserError:
    """`how`: what became of the other process."""
    return UserError(
        "--engine ort: ONNX Runtime cannot train this model: another process, in which a step was "
        f"tried, {how}; take --engine torch"
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
