"""Export to ONNX: a file, which ONNX Runtime checks before it gets its final name."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..errors import UserError, one_line
from ..files import written_aside
from ..weights.card import ModelCard, TextCard
from .export_samples import SAMPLES, metadata_of, samples_for
from .onnx_model import OnnxSession, close, trace, traceable

_OTHER_WAY = "export to safetensors, or try other versions of torch, onnx and onnxscript"


def export_onnx(
    model: nn.Module,
    card: ModelCard | TextCard,
    path: Path,
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

    `onnx.checker` checks the graph. ONNX Runtime, where it is installed, computes probabilities of
    random inputs, which are compared with PyTorch's.

    Returns:
        the outcome of these checks, in one line.

    Raises:
        UserError: the model has no ONNX form or is too large, the file cannot be written, or a
            check fails.
    """
    import onnx

    model = traceable(model, "export a smaller model, or to safetensors")
    samples = samples_for(card)
    proto = trace(
        samples.graph(model), samples.example(), samples.dynamic_shapes(), samples.name,
        "probabilities",
    )  # fmt: skip
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
            raise UserError(f"{path}: {one_line(error, 200)}: {_OTHER_WAY}") from error
        try:
            session = OnnxSession(proto, _OTHER_WAY)
        except ImportError:
            return "graph valid; not run: pip install onnxruntime to have its answers compared"
        probabilities = session.run(random)
        difference = float(np.abs(probabilities - expected).max())
        if not close(probabilities, expected):
            raise UserError(
                f"{path}: the probabilities of {session.engine}, or their logarithms, differ too "
                f"much from PyTorch's (by {difference:.1e}); no file is left: {_OTHER_WAY}"
            )
    return (
        f"graph valid; on {SAMPLES} random {samples.what} {session.engine} is within "
        f"{difference:.1e} of PyTorch's probabilities"
    )
