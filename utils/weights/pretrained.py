"""Weights from elsewhere into a model: from files and from runs of ours (imagenet.py has others).

`load_pretrained` reads them, `fit_weights` puts them into a model: all of them, or nothing.
"""

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
from utils.weights.card import ModelCard, TextCard, card_of
from utils.weights.files import read_pth, read_safetensors

PICKLED = (".pth", ".pt", ".bin")


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


def load_pretrained(source: str | Path, say: Callable = print) -> Pretrained:
    """Reads weights, from one of

    - the folder of a run (its best checkpoint where it has a validation split, else its newest) or
      of one checkpoint, the averaged weights where there are any;
    - a `.safetensors` file, or a `.pth`, `.pt` or `.bin` file of PyTorch.

    Args:
        source: the folder or the file.
        say: told, in a line, what was passed over.

    Raises:
        UserError: there are no weights to be had from there.
    """
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


def fit_weights(model: nn.Module, pretrained: Pretrained, say: Callable = print) -> None:
    """Copies `pretrained` into `model`, all of it or, where it does not fit, nothing.

    Two things may differ, and are said. A head of another shape, or none, leaves the model's as it
    is. A first convolution over colours is summed over them for a model of gray pictures, which
    gives what the original gives for a gray picture (as timm does: `adapt_input_conv` in
    timm/models/_manipulate.py). Numbers of another precision are converted.

    Args:
        model: `HEAD` names its module that turns features into logits. It may have
            `flags_for(tensors)`, which says by which flags it would get their shapes: a list,
            empty where that cannot be told, None where no model of its class has them.

    Raises:
        UserError: anything else is missing, left over or of another shape.
    """
    head = model.HEAD
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
    _check_fit(model, state, tensors, pretrained.source_text)
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)  # keeps its dtype, device and memory format
    for note in notes:
        say(f"{pretrained.source_text}: {note}")


def _check_fit(
    model: nn.Module, state: dict[str, Tensor], tensors: dict[str, Tensor], source: str
) -> None:
    """UserError unless `tensors` has the names and shapes of `state`, and finite numbers.

    Args:
        state: the part of the model's that is to be copied into.
    """
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
            f"{_advice(model, tensors)}"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise UserError(
                f"{source}: {name} holds values that are not finite; take an earlier checkpoint, "
                "or another file"
            )


def _advice(model: nn.Module, tensors: dict[str, Tensor]) -> str:
    """What to do about weights of another architecture; the model knows its own relatives."""
    changes = model.flags_for(tensors) if hasattr(model, "flags_for") else []
    if changes is None:
        return "its architecture is none that there is here; take other weights"
    if not changes:
        return "take weights of the same architecture"
    return f"train with {' '.join(changes)}"


def _first_convolution(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return f"{name}.weight"
    return None


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


# ---- sources ----------------------------------------------------------------------------------


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
