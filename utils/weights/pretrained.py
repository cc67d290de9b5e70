"""Weights from elsewhere into a model: files, runs of ours, torchvision's ImageNet weights.

`load_pretrained` reads them, `fit_weights` puts them into a model: all of them, or nothing.
"""

import contextlib
import re
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.checkpoints.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
    DamagedCheckpoint,
    read_checkpoint,
)
from utils.errors import UserError
from utils.models.resnet import STAGES
from utils.weights.card import ModelCard, TextCard, card_of
from utils.weights.files import canonical, read_pth, read_safetensors

PICKLED = (".pth", ".pt", ".bin")
TIMEOUT_S = 30  # of a download, without a single byte


@dataclass(frozen=True, eq=False)
class Pretrained:
    """Weights on the CPU under canonical names, and where they came from.

    `mean` and `std` are those that the model was trained with, per channel, None where unknown:
    the model works best with pictures normalised alike.
    """

    tensors: dict[str, Tensor]
    source_text: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    texts: TextCard | None = None  # of a model of texts

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) for pictures of `channels`: gray ones get the average over the colours."""
        if self.mean is None or self.std is None:
            return None
        if channels == 1:
            return (sum(self.mean) / len(self.mean),), (sum(self.std) / len(self.std),)
        return (self.mean, self.std) if channels == len(self.mean) else None


def load_pretrained(source: str | Path, architecture: str, say: Callable = print) -> Pretrained:
    """Reads weights, from one of

    - `imagenet`: torchvision's for `architecture`, downloaded once (`TORCH_HOME` says where to);
    - the folder of a run (its best checkpoint where it has a validation split, else its newest) or
      of one checkpoint, the averaged weights where there are any;
    - a `.safetensors` file, or a `.pth`, `.pt` or `.bin` file of PyTorch.

    Args:
        source: the word, the folder or the file; a folder of that name is `./imagenet`.
        architecture: such as "resnet50".
        say: told, in a line, what was passed over.

    Raises:
        UserError: there are no weights to be had from there.
    """
    if str(source) == "imagenet":
        return _imagenet(architecture)
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, say)
    if not path.is_file():
        raise UserError(
            f"--pretrained {source}: there is no such file or folder; give one, or imagenet"
        )
    if path.suffix == ".safetensors":
        tensors, card = read_safetensors(path)
        return _with_card(tensors, str(path), card)
    if path.suffix in PICKLED:
        tensors, nest = read_pth(path)
        return Pretrained(tensors, f"{path} ({nest})" if nest else str(path))
    raise UserError(
        f"--pretrained {path} is no file of weights: give a .safetensors, .pth, .pt or .bin file, "
        "the folder of a run, or imagenet"
    )


def fit_weights(
    model: nn.Module, pretrained: Pretrained, head: str = "fc", say: Callable = print
) -> None:
    """Copies `pretrained` into `model`, all of it or, where it does not fit, nothing.

    Two things may differ, and are said. A head of another shape, or none, leaves the model's as it
    is. A first convolution over colours is summed over them for a model of gray pictures, which
    gives what the original gives for a gray picture (as timm does: `adapt_input_conv` in
    timm/models/_manipulate.py). Numbers of another precision are converted.

    Args:
        head: the module that turns features into logits.

    Raises:
        UserError: anything else is missing, left over or of another shape.
    """
    state = model.state_dict()  # shares the memory of the model
    tensors = dict(pretrained.tensors)
    notes = []
    ours = {name for name in state if name.startswith(f"{head}.")}
    theirs = {name for name in tensors if name.startswith(f"{head}.")}
    if {name: state[name].shape for name in ours} != {name: tensors[name].shape for name in theirs}:
        classes = len(state[f"{head}.weight"])
        weight = tensors.get(f"{head}.weight")
        if weight is None:
            notes.append(f"no head in the file: one of {classes} classes starts untrained")
        else:
            notes.append(f"head of {len(weight)} classes replaced by one of {classes}")
        state = {name: tensor for name, tensor in state.items() if name not in ours}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in theirs}
    first = _first_convolution(model)
    if first in tensors and first in state:
        weight, wanted = tensors[first], state[first].shape
        if weight.ndim == 4 and weight.shape[1] == 3 and wanted[1] == 1:
            tensors[first] = weight.float().sum(1, keepdim=True)
            notes.append(f"{first} summed over its 3 colours, for gray pictures")
    _check_fit(state, tensors, pretrained.source_text)
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)  # keeps its dtype, device and memory format
    for note in notes:
        say(f"{pretrained.source_text}: {note}")


def _check_fit(state: dict[str, Tensor], tensors: dict[str, Tensor], source: str) -> None:
    """UserError unless `tensors` has the names and shapes of `state`, and finite numbers."""
    wrong = []
    for name in sorted(state.keys() | tensors.keys()):
        if name not in tensors:
            # The counter is missing in files older than PyTorch 0.4.1, and has no use with a
            # fixed momentum.
            if not name.endswith("num_batches_tracked"):
                wrong.append(f"{name} {_shape(state[name])} is missing")
        elif name not in state:
            wrong.append(f"{name} {_shape(tensors[name])} has no place in the model")
        elif state[name].shape != tensors[name].shape:
            shapes = f"{_shape(tensors[name])}, in the model {_shape(state[name])}"
            wrong.append(f"{name} is {shapes}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{source} does not fit the model: {'; '.join(wrong[:3])}{more}: "
            f"{_advice(state, tensors)}"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise UserError(
                f"{source}: {name} holds values that are not finite; take an earlier checkpoint, "
                "or another file"
            )


def _advice(state: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    """Which flags would make a ResNet of the shapes of `tensors`."""
    name = "conv1.weight"
    if not (name in tensors and tensors[name].ndim == 4 and name in state):
        return "take weights of the same architecture"
    theirs, ours = tensors[name].shape, state[name].shape
    flags = []
    if theirs[2:] != ours[2:]:
        flags.append("--stem imagenet" if theirs[2] == 7 else "--stem cifar")
    if theirs[0] != ours[0]:
        flags.append(f"--width {theirs[0]}")
    depth = _depth(tensors)
    if depth is None and _depth(state) is not None:
        return "its architecture is none that there is here; take other weights"
    if depth != _depth(state):
        flags.append(f"--depth {depth}")
    if theirs[1] != ours[1]:
        flags.append(f"pictures of {theirs[1]} channels")
    return f"train with {' '.join(flags)}" if flags else "take weights of the same architecture"


def _depth(tensors: dict[str, Tensor]) -> int | None:
    """The depth of the ResNet that has these tensors, None where there is none."""
    blocks = [re.match(r"layer(\d)\.\d+\.conv1\.weight$", name) for name in tensors]
    counts = Counter(int(found[1]) for found in blocks if found)
    bottleneck = "layer1.0.conv3.weight" in tensors
    stages = tuple(counts[stage] for stage in (1, 2, 3, 4))
    matches = [d for d, blocks in STAGES.items() if blocks == stages and (d >= 50) == bottleneck]
    return matches[0] if matches else None


def _first_convolution(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return f"{name}.weight"
    return None


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


# ---- sources ----------------------------------------------------------------------------------


def _imagenet(architecture: str) -> Pretrained:
    if not architecture.startswith("resnet"):
        raise UserError(
            f"--pretrained imagenet: those weights are of pictures, and {architecture} is not: "
            "name a run or a file"
        )
    if architecture not in {f"resnet{depth}" for depth in STAGES}:
        depths = ", ".join(map(str, STAGES))
        raise UserError(
            f"--pretrained imagenet: there are no ImageNet weights of {architecture}; they are of "
            f"--width 64 and one of --depth {depths}"
        )
    from torchvision.models import get_model_weights  # takes a second

    weights = get_model_weights(architecture).DEFAULT
    cached = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    waited = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # PyTorch would wait for a silent server for ever
    try:
        # PyTorch announces the download on stdout, which is for results.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = torch.hub.load_state_dict_from_url(
                weights.url,
                map_location="cpu",
                progress=sys.stderr.isatty(),
                check_hash=True,
                weights_only=True,
            )
    except Exception as error:  # of the network, the disk, the sum or the unpickler
        if cached.exists():
            raise UserError(f"{cached} is damaged: remove it, it is downloaded anew") from error
        cause = getattr(error, "reason", error)
        text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise UserError(
            f"--pretrained imagenet: cannot get {weights.url}: {' '.join(text.split())}; download "
            f"it elsewhere and give the file, or put it at {cached}"
        ) from error
    finally:
        socket.setdefaulttimeout(waited)
    transforms = weights.transforms()
    source = f"ImageNet weights of {architecture} ({weights.name})"
    return Pretrained(
        canonical(tensors, source), source, tuple(transforms.mean), tuple(transforms.std)
    )


def _from_folder(path: Path, say: Callable) -> Pretrained:
    """The weights of a run, or of one of its checkpoints."""
    try:
        if (path / MODEL).exists() or (path / STATE).exists():
            checkpoint = read_checkpoint(path)
        else:
            folder = path if path.name == "checkpoints" else path / "checkpoints"
            store = Checkpoints(folder, warn=say)
            checkpoint = store.load()
            if checkpoint is None:
                raise UserError(
                    f"--pretrained {path} has no checkpoint: give the folder of a run that has one"
                )
            best = (checkpoint.state.get("progress") or {}).get("best_step")
            if best is not None and best != checkpoint.step:
                better = store.folder / f"step-{best:08}"
                try:
                    checkpoint = read_checkpoint(better)
                    path = better
                except DamagedCheckpoint as error:
                    say(f"the best checkpoint, {better}, is damaged ({error}): the newest is taken")
    except DamagedCheckpoint as error:
        raise UserError(
            f"--pretrained {path} is damaged ({error}): give another checkpoint of the run"
        ) from None
    averaged = "" if checkpoint.average is None else ", averaged"
    source = f"{path}, step {checkpoint.step}{averaged}"
    data = (checkpoint.state.get("settings") or {}).get("data")
    try:
        card = card_of(data) if data else None
    except ValueError as error:
        raise UserError(f"{source}: what it says of its data is wrong ({error})") from None
    return _with_card(checkpoint.weights, source, card)


def _with_card(
    tensors: dict[str, Tensor], source: str, card: ModelCard | TextCard | None
) -> Pretrained:
    if isinstance(card, TextCard):
        return Pretrained(tensors, source, texts=card)
    return Pretrained(tensors, source, card and card.mean, card and card.std)
