"""Pretrained weights from files and runs (published weights: published.py).

`load_pretrained` reads them, `fit_weights` copies all or none of them into a model.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import (
    MODEL,
    STATE,
    Checkpoint,
    Checkpoints,
    DamagedCheckpoint,
    read_checkpoint,
)
from ..errors import UserError
from ..models.named import convert_weights, is_vit
from ..models.parts import heads_of
from .card import ModelCard, TextCard, card_of
from .files import read_pth, read_safetensors

PICKLED = (".pth", ".pt", ".bin", ".pth.tar", ".ckpt")
# Prefixes that DistributedDataParallel, torch.compile and Lightning add to names.
WRAPPERS = ("module.", "_orig_mod.", "model.")
# Weights in a folder of the Hugging Face hub, the best first.
HUB_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, eq=False)
class Pretrained:
    """Weights on the CPU under the names of their file, and where they came from.

    `given` are the weights, or fetches them when they are first needed: a fault of the data, or of
    a setting, is told before a download. `mean` and `std`, per channel, normalised the pictures
    that the model was trained with; None: unknown. Other pictures should be normalised by them,
    too.
    """

    given: dict[str, Tensor] | Callable[[], dict[str, Tensor]]
    source_text: str  # for messages
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    card: ModelCard | TextCard | None = None  # of a run or an exported file
    encoder: Any = None  # EncoderFiles (encoders.py), if it is one

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return self.given() if callable(self.given) else self.given

    @property
    def classes(self) -> tuple[str, ...]:
        """In the order of the head's outputs; empty: unknown."""
        return self.card.classes if self.card else ()

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) for pictures of `channels`; for gray ones the average over the colours."""
        if self.mean is None or self.std is None:
            return None
        if channels == 1:
            return (sum(self.mean) / len(self.mean),), (sum(self.std) / len(self.std),)
        return (self.mean, self.std) if channels == len(self.mean) else None


def load_pretrained(source: str | Path, say: Callable = print, use=None) -> Pretrained:
    """Reads weights from one of

    - the folder of a run: its model, see `Checkpoints.model`;
    - the folder of a checkpoint;
    - a model's folder from the Hugging Face hub, with config.json, or that in the hub's cache;
    - a `.safetensors`, `.pth`, `.pth.tar`, `.pt`, `.bin` or `.ckpt` file, or FILE:PREFIX, those of
      its tensors whose names begin so; a file within a checkpoint stands for its folder.

    Of a checkpoint, the averaged weights are read if there are any.

    Args:
        say: is given a line on what is passed over: a damaged checkpoint, objects of a pickle.
        use: "best" or "last" weights of a run; None: its model.

    Raises:
        UserError: no weights can be read from `source`.
    """
    path, part = Path(source), ""
    if not path.exists() and Path(file := str(source).rpartition(":")[0]).is_file():
        path, part = Path(file), str(source).rpartition(":")[2]
    if path.is_dir():
        hub = hub_folder(path)
        return _from_folder(path, say, use) if hub is None else _fromhub_folder(hub)
    if not path.is_file():
        raise UserError(
            f"--pretrained {source}: there is no such file or folder; give a file of "
            "weights, the folder of a run or, for pictures, imagenet"
        )
    if path.suffix == ".safetensors" and (path.parent / STATE).is_file() and not part:
        return _from_folder(path.parent, say)
    card, nest = None, ""
    if path.suffix == ".safetensors":
        tensors, card = read_safetensors(path)
    elif path.name.endswith(PICKLED):
        tensors, nest = read_pth(path, say, part)
        if part in (keys := nest.split("/")):  # it is in `source`
            keys.remove(part)
            nest, part = "/".join(keys), ""
    else:
        raise UserError(
            f"--pretrained {path} is not a file of weights: give a .safetensors, .pth, .pth.tar, "
            ".ckpt, .pt or .bin file, the folder of a run or, for pictures, imagenet"
        )
    prefix = f"{part}." if part else ""
    tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if not tensors:
        raise UserError(f"--pretrained {source}: no name in the file begins with {prefix}")
    return _with_card(tensors, f"{source} ({nest})" if nest else str(source), card)


def fit_weights(
    model: nn.Module,
    pretrained: Pretrained,
    say: Callable = print,
    with_head: bool = False,
    classes: Sequence[str] = (),
) -> None:
    """Copies `pretrained` into `model`, or nothing if it does not fit.

    A prefix without which most names fit is taken away (`_own_names`).
    Weights under other names, or for pictures of another size, are converted where the model or
    timm knows how (`convert_weights` in utils/models/named.py). More differences are allowed, with
    a note to `say`. If the file's head is for other classes or is missing, the model's head stays
    as it is, but for weights that are far too large (`_smaller_head`); if it has the same classes
    in another order, it is sorted. If the first convolution
    takes 3 colours and the model gray pictures, it is summed over the colours, which gives the same
    output for a gray picture (as in timm: `adapt_input_conv` in timm/models/_manipulate.py).
    Tensors of another dtype are converted.

    Args:
        model: it may have `flags_for(tensors)`: the changes, mostly flags, by which its parameters
            would have the shapes of `tensors`; an empty list if they cannot be determined, None if
            no model of its class has those shapes.
        with_head: the head must fit, too, as nothing trains it.
        classes: of the data, in the order of the model's outputs; empty: only their number counts.

    Raises:
        UserError: any other tensor is missing, superfluous or of another shape, or values are not
            finite.
    """
    state = model.state_dict()  # shares the memory of the model
    tensors, how = _own_names(pretrained.tensors, state, pretrained.source_text)
    size = pretrained.card.picture_size if pretrained.card else None
    # A ViT has as many positions for other pictures of the same area.
    if _shapes(state) != _shapes(tensors) or (size and is_vit(model)):
        tensors = convert_weights(model, tensors, size)
    state, tensors, notes = _fit_heads(model, state, tensors, pretrained, with_head, tuple(classes))
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
    for note in [f"{len(tensors)} tensors loaded{how}"] * bool(how) + notes:
        say(f"{pretrained.source_text}: {note}")


def _fit_heads(
    model: nn.Module,
    state: dict[str, Tensor],
    tensors: dict[str, Tensor],
    pretrained: Pretrained,
    with_head: bool,
    classes: tuple[str, ...],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """(`state` and `tensors` without the heads that stay as they are, notes); see `fit_weights`."""
    other = next((name for name in pretrained.classes if name not in classes), None)
    overlap = any(name in classes for name in pretrained.classes)
    notes = []
    for head in heads_of(model):
        ours, theirs = _part(state, head), _part(tensors, head)
        fits = _shapes(ours) == _shapes(theirs)
        if fits and not (other and overlap):
            if classes and other:
                notes.append(
                    f"its classes have other names, such as {other!r}: taken for those of the "
                    "data, in their order"
                )
            elif overlap and pretrained.classes != classes:
                rows = [pretrained.classes.index(name) for name in classes]
                layer = [*ours][-1].rpartition(".")[0]
                tensors |= {name: t[rows] for name, t in _part(tensors, layer).items()}
                notes.append("the head's classes are sorted as those of the data")
            continue
        count = len([*ours.values()][-1])
        if with_head:
            has = f"has {len([*theirs.values()][-1])} classes" if theirs else "has no head"
            has = f"was trained for other classes, such as {other!r}" if fits else has
            raise UserError(
                f"{pretrained.source_text} {has}, and the data have {count}: without training "
                "only weights for the same classes can be evaluated"
            )
        if not theirs:
            notes.append(f"there is no head: one of {count} classes starts untrained")
        else:
            before = len([*theirs.values()][-1])
            which = f"{before} other classes, such as {other!r}," if fits else f"{before} classes"
            notes.append(f"head of {which} replaced by one of {count}")
        smaller = _smaller_head(model, ours)
        state = {n: t for n, t in state.items() if n not in ours or n in smaller}
        tensors = {n: t for n, t in tensors.items() if n not in theirs} | smaller
    return state, tensors, notes


def _smaller_head(model: nn.Module, head: dict[str, Tensor]) -> dict[str, Tensor]:
    """{name: weight} of a new head's last layer, scaled down to the size at which PyTorch draws the
    weights of a linear layer if it is more than twice as large; else {}.

    timm draws those of EfficientNets and MobileNets by the number of classes, and with few classes
    ten times as large: the loss begins far above that of a guess, and its gradient spoils trained
    features.
    """
    last = [*head][-1].rpartition(".")[0]
    layer, name = model.get_submodule(last), f"{last}.weight"
    if not isinstance(layer, nn.Linear) or name not in head:
        return {}
    usual = (3 * layer.in_features) ** -0.5  # the standard deviation in nn.Linear
    factor = usual / head[name].std().clamp_min(usual)
    return {name: factor * head[name]} if factor < 0.5 else {}


def _own_names(given: dict[str, Tensor], state: dict[str, Tensor], source: str):
    """(`given` by the names in `state`, a note on their prefix and on what is left out, or "").

    The prefix is taken away without which the most tensors have a name and shape of `state`; others
    are left out if they have none, also without WRAPPERS. UserError if others fit equally well.
    """
    held: dict[str, dict[str, Tensor]] = {}  # prefix -> {name in `state`: tensor}
    for name, tensor in given.items():
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            if name[start:] in state:
                held.setdefault(name[:start], {})[name[start:]] = tensor
    ranks = {}
    for prefix, tensors in held.items():
        if 2 * len(tensors) > min(len(state), len(given)):
            averaged = re.search("encoder_k|momentum", prefix)  # of MoCo, beside what is trained
            fitting = sum(state[name].shape == tensor.shape for name, tensor in tensors.items())
            ranks[prefix] = averaged is None, fitting, len(tensors)
    best = max(ranks, key=ranks.__getitem__, default="")
    for other in [p for p in ranks if p != best and ranks[p] == ranks[best]]:
        if any(not torch.equal(t, held[other].get(n, t[None])) for n, t in held[best].items()):
            raise UserError(
                f"{source}: the tensors {best}* and {other}* fit the model equally well: choose by "
                f"the prefix, as in --pretrained FILE:{(other or best)[:-1]}"
            )
    own, left = {}, []
    for name in sorted(given, key=lambda name: not name.startswith(best)):
        short = name.removeprefix(best)
        bare = re.sub(f"^({'|'.join(map(re.escape, WRAPPERS))})+", "", short)
        short = next((n for n in (short, bare, *(p + bare for p in WRAPPERS)) if n in state), bare)
        if short in own or not (name.startswith(best) or short in state):
            left.append(name)
        else:
            own[short] = given[name]
    note = f" without the prefix {best}" if best else ""
    return own, f"{note}; {len(left)} left out, such as {left[0]}" if left else note


def _part(tensors: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    """The tensors of the module, by their names in the whole model."""
    return {name: t for name, t in tensors.items() if name.startswith(f"{module}.")}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _check_fit(
    model: nn.Module, state: dict[str, Tensor], tensors: dict[str, Tensor], source: str
) -> None:
    """UserError unless `tensors` has the names and shapes of `state`, and finite numbers.

    Args:
        state: the tensors of `model` that would be overwritten.
    """
    wrong = []
    for name in sorted(state.keys() | tensors.keys()):
        if name not in tensors:
            # Files older than PyTorch 0.4.1 lack this counter, which BatchNorm with a fixed
            # momentum does not use.
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
            f"{source} does not fit the model: {_advice(model, tensors)} ("
            f"{'; '.join(wrong[:3])}{more})"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise UserError(
                f"{source}: {name} holds values that are not finite; give an earlier checkpoint "
                "or another file"
            )


def _advice(model: nn.Module, tensors: dict[str, Tensor]) -> str:
    """A part of a message: what to do about weights of another architecture."""
    changes = model.flags_for(tensors) if hasattr(model, "flags_for") else []
    if changes is None:
        return "no model here has its architecture; give other weights"
    if not changes:
        return "give weights of the same architecture"
    return f"train with {' '.join(changes)}"


def _first_convolution(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return f"{name}.weight"
    return None


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


# ---- sources ----------------------------------------------------------------------------------


def _from_folder(path: Path, say: Callable, use: str | None = None) -> Pretrained:
    """The weights of a run, or of one of its checkpoints."""
    try:
        if (path / MODEL).exists() or (path / STATE).exists():
            checkpoint: Checkpoint | None = read_checkpoint(path)
        else:
            folder = path if path.name == "checkpoints" else path / "checkpoints"
            checkpoint = Checkpoints(folder, warn=say).model(use)
    except DamagedCheckpoint as error:
        raise UserError(
            f"--pretrained {path} is damaged ({error}): give another checkpoint of the run"
        ) from None
    if checkpoint is None:
        raise UserError(
            f"--pretrained {path} has no checkpoint: give the folder of a run that has one"
        )
    averaged = "" if "average" not in checkpoint.parts else ", averaged"
    source = f"{path}, step {checkpoint.step}{averaged}"
    data = checkpoint.run_info.get("data")
    try:
        card = card_of(data) if data else None
    except ValueError as error:
        raise UserError(f"{source}: its description of the data is wrong ({error})") from None
    return _with_card(checkpoint.weights, source, card)


def hub_folder(path: Path) -> Path | None:
    """The folder with config.json, if `path` is of a model of the Hugging Face hub."""
    snapshots = sorted(path.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    if snapshots:
        return snapshots[-1].parent
    return path if (path / "config.json").is_file() and not (path / STATE).exists() else None


def _fromhub_folder(path: Path) -> Pretrained:
    """The weights beside a config.json, as timm writes it."""
    file = next((path / name for name in HUB_FILES if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"--pretrained {path} has config.json, but none of {', '.join(HUB_FILES)}")
    tensors = (read_safetensors if file.suffix == ".safetensors" else read_pth)(file)[0]
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = config.get("pretrained_cfg", config)  # where timm has the normalisation
        mean, std = (tuple(map(float, config[name])) for name in ("mean", "std"))
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(f"{path / 'config.json'} is damaged: download it again") from None
    except KeyError:
        return Pretrained(tensors, str(path))
    return Pretrained(tensors, str(path), mean, std)


def _with_card(
    tensors: dict[str, Tensor], source: str, card: ModelCard | TextCard | None
) -> Pretrained:
    mean, std = (card.mean, card.std) if card else (None, None)
    return Pretrained(tensors, source, mean, std, card)
