"""A trained model for use elsewhere: as weights that say what they need, or as an ONNX graph.

Either file is checked before it takes its name: what cannot be trusted is not left behind.
"""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from utils.data.images.loader import Normalize
from utils.data.texts.tokenizer import pad_id, tokenizer_from_json, vocabulary_size
from utils.errors import UserError
from utils.files import written_aside
from utils.weights.card import ModelCard, TextCard
from utils.weights.files import CARD
from utils.weights.pretrained import fit_weights, load_pretrained

SAMPLES = 5  # in a check; another number than in the trace, so that the batch must be dynamic
# Between PyTorch and another engine in float32: of probabilities, and of their logarithms, where a
# model that is certain of one class shows its differences.
TOLERANCE, LOG_TOLERANCE = 1e-4, 0.1
# What a protocol buffer can hold; beyond it ONNX keeps the weights in a second file.
ONNX_BYTES = 2_000_000_000
# onnx.reference does some 5e9 multiply-adds in a second; it is asked for ten seconds at most.
REFERENCE_MULTIPLY_ADDS = 50_000_000_000
_OTHER_WAY = "export to safetensors, or try other versions of torch, onnx and onnxscript"


def export_safetensors(
    model: nn.Module, card: ModelCard | TextCard, path: str | Path, architecture: str = ""
) -> str:
    """Writes the weights, with `card` and `architecture` in the one metadata key, `CARD`.

    `load_pretrained` reads the file, and so does every other reader of safetensors. It is loaded
    on the spot into a copy of the model that was emptied before, which must then answer random
    inputs with the same bits. The same weights give the same bytes.

    Returns what was checked. Raises UserError where the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: the name of the file must end in .safetensors")
    model = _plain_copy(model)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(model.state_dict().items())}
    text = json.dumps({"architecture": architecture} | card.to_dict())
    with written_aside(path) as aside:
        aside.write_bytes(to_bytes(tensors, metadata={CARD: text}))
        restored = copy.deepcopy(model)
        for tensor in restored.state_dict().values():
            tensor.zero_()
        fit_weights(restored, load_pretrained(aside))
        kind = _kind(card)
        inputs = kind.prepared(kind.random())
        with torch.inference_mode():
            if not torch.equal(model(inputs), restored(inputs)):
                raise UserError(
                    f"{path}: what was read back answers otherwise than the model; the disk or the "
                    "memory is at fault, try again"
                )
    return f"read back, and equal to the bit on {SAMPLES} random {kind.what}"


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
    model = _plain_copy(model).to(memory_format=torch.contiguous_format)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > ONNX_BYTES:
        raise UserError(
            f"the weights take {size / 1e9:.1f} GB, and an ONNX file holds 2 GB: export a smaller "
            "model, or to safetensors"
        )
    kind = _kind(card)
    proto = _trace(model, kind)
    metadata = {key: json.dumps(card.to_dict()[key]) for key in kind.metadata}
    onnx.helper.set_model_props(proto, metadata | {"architecture": architecture})
    random = kind.random()
    with torch.inference_mode():
        expected = model(kind.prepared(random)).softmax(1).numpy()
    with written_aside(path) as aside:
        aside.write_bytes(proto.SerializeToString())
        try:
            onnx.checker.check_model(str(aside), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UserError(f"{path}: {_one_line(error)}: {_OTHER_WAY}") from error
        probabilities, engine = _answers(proto, model, kind, random)
        if probabilities is None:
            return f"graph valid; {engine}"
        difference = float(np.abs(probabilities - expected).max())
        if not _close(probabilities, expected):
            raise UserError(
                f"{path}: the probabilities of {engine}, or their logarithms, differ too much from "
                f"PyTorch's (by {difference:.1e}); no file is left: {_OTHER_WAY}"
            )
    return (
        f"graph valid; on {SAMPLES} random {kind.what} {engine} is within {difference:.1e} of "
        "PyTorch's probabilities"
    )


class _Pictures:
    """What a model of pictures is traced and checked with."""

    name, what, metadata = "images", "pictures", ("classes", "mean", "std")

    def __init__(self, card: ModelCard):
        self.card = card
        self.normalize = Normalize(card.mean, card.std, card.width, torch.device("cpu"))

    def example(self) -> Tensor:
        card = self.card
        return torch.zeros(2, card.height, card.width, card.channels, dtype=torch.uint8)

    def random(self) -> np.ndarray:
        """(SAMPLES, height, width, channels) uint8: noise of several strengths, black, white."""
        shape = (SAMPLES, *self.example().shape[1:])
        pictures = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        pictures[1] //= 4
        pictures[-2], pictures[-1] = 0, 255
        return pictures

    def prepared(self, pictures: np.ndarray) -> Tensor:
        """As in training: (n, channels, height, width) float32."""
        return self.normalize(torch.from_numpy(pictures))

    def dynamic_shapes(self) -> dict:
        return {0: torch.export.Dim("batch")}

    def graph(self, model: nn.Module) -> nn.Module:
        return _FromPixels(model, self.card)


class _Ids:
    """What a model of texts is traced and checked with."""

    name, what, metadata = "ids", "texts", ("classes", "max_len", "clean")

    def __init__(self, card: TextCard):
        tokenizer = tokenizer_from_json(card.tokenizer)
        self.size, self.pad = vocabulary_size(tokenizer), pad_id(tokenizer)
        self.max_len, self.length = card.max_len, min(card.max_len, 24)

    def example(self) -> Tensor:
        return torch.from_numpy(self.random()[:2, : max(2, self.length // 2)])

    def random(self) -> np.ndarray:
        """(SAMPLES, length) int64: texts of several lengths, the shortest of one token."""
        ids = np.random.default_rng(0).integers(0, self.size, (SAMPLES, self.length))
        ids[ids == self.pad] = (self.pad + 1) % self.size
        lengths = np.linspace(self.length, 1, SAMPLES).astype(int)
        return np.where(np.arange(self.length) < lengths[:, None], ids, self.pad)

    def prepared(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids)

    def dynamic_shapes(self) -> dict:
        return {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=self.max_len)}

    def graph(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Softmax(1))


def _kind(card: ModelCard | TextCard) -> _Pictures | _Ids:
    return _Ids(card) if isinstance(card, TextCard) else _Pictures(card)


class _FromPixels(nn.Module):
    """uint8 (n, height, width, channels) -> probabilities (n, classes)."""

    def __init__(self, model: nn.Module, card: ModelCard):
        super().__init__()
        self.model = model
        normalize = Normalize(card.mean, card.std, 1, torch.device("cpu"))
        self.register_buffer("scale", normalize.scale)  # (channels,)
        self.register_buffer("shift", normalize.shift)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.float() * self.scale + self.shift
        return self.model(pixels.permute(0, 3, 1, 2)).softmax(1)


def _trace(model: nn.Module, kind: _Pictures | _Ids):
    """The ONNX model, without the paths and lines of source that the exporter leaves in it."""
    try:
        with _silence():
            program = torch.onnx.export(
                kind.graph(model).eval(),
                (kind.example(),),
                dynamo=True,
                verbose=False,
                input_names=[kind.name],
                output_names=["probabilities"],
                dynamic_shapes=(kind.dynamic_shapes(),),
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
    proto, model: nn.Module, kind: _Pictures | _Ids, samples: np.ndarray
) -> tuple[np.ndarray | None, str]:
    """Probabilities by another engine and its name, or None and why there are none."""
    try:
        import onnxruntime
    except ImportError:
        cost = _multiply_adds(model, kind.prepared(samples))
        if cost > REFERENCE_MULTIPLY_ADDS:
            return None, "not run: pip install onnxruntime to have its answers compared"
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(proto).run(None, {kind.name: samples})[0], "onnx.reference"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        probabilities = session.run(None, {kind.name: samples})[0]
    except Exception as error:  # its exceptions have no public base
        raise UserError(
            f"ONNX Runtime refuses the graph ({_one_line(error)}): {_OTHER_WAY}"
        ) from error
    return probabilities, f"ONNX Runtime {onnxruntime.__version__}"


def _close(probabilities: np.ndarray, expected: np.ndarray) -> bool:
    """Both within the tolerances; not if one of them is not a number."""
    large = expected > 1e-30  # the others are at the end of float32's range
    logarithms = np.log(np.maximum(probabilities[large], 1e-38)) - np.log(expected[large])
    difference = np.abs(probabilities - expected).max()
    return bool(difference < TOLERANCE and np.abs(logarithms).max() < LOG_TOLERANCE)


def _multiply_adds(model: nn.Module, inputs: Tensor) -> int:
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


def _plain_copy(model: nn.Module) -> nn.Module:
    """In float32 on the CPU, for evaluation."""
    return copy.deepcopy(model).cpu().float().eval()


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
