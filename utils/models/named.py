"""Models by name: any classifier of timm, or a class in a file of the user's own."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import user_files
from ..errors import UserError, one_line
from ..place import PACKAGE
from ..plural import counted

# What timm's files call the function that brings weights by others under timm's names and sizes.
CONVERTERS = ("checkpoint_filter_fn", "_filter_fn", "pretrained_filter_fn")
# Arguments of timm's VisionTransformer that `own_vit` sets, and where they come from.
SET_BY = {
    "patch_size": "--patch_size", "depth": "--layers", "embed_dim": "--dim", "num_heads": "--heads",
    "mlp_ratio": "--ffn", "global_pool": "--pooling", "class_token": "--pooling",
    "img_size": "--image_size", "layers": "--layers", "dim": "--dim", "heads": "--heads",
    "ffn": "--ffn", "pooling": "--pooling", "in_chans": "the pictures",
    "num_classes": "the data's classes",
}  # fmt: skip


def timm_names(pattern: str = "*") -> list[str]:
    """timm's classifiers whose names match a shell pattern, sorted; a word alone may stand anywhere
    in the name. Raises UserError if there is none."""
    import timm

    wild = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = [name for name in timm.list_models() if fnmatch.fnmatch(name, wild)]
    if not names:
        raise UserError(f"--model list: no model of timm matches {pattern!r}{_near(pattern)}")
    return names


def own_vit(
    classes: int, height: int, width: int, channels: int, *, patch_size: int, layers: int, dim: int,
    heads: int, ffn: int, pooling: str, positions: str, arguments: Mapping[str, Any],
) -> nn.Module:  # fmt: skip
    """A `ViT` (utils/models/vit.py) of these sizes.

    Args:
        arguments: more of timm's VisionTransformer.

    Raises:
        UserError: the sizes do not fit each other or the pictures, or an argument is wrong.
    """
    from .vit import ViT

    for name in arguments:
        if name in SET_BY:
            raise UserError(f"--model_kwargs {name}: with --model vit {SET_BY[name]} decides it")
    try:
        return ViT(
            classes, height, width, channels, patch_size, layers, dim, heads, ffn, pooling,
            positions, **arguments,
        )  # fmt: skip
    except Exception as error:
        raise UserError(f"--model vit{_given(arguments)}: {one_line(error, 300)}") from None


def timm_model(
    name: str,
    classes: int,
    height: int,
    width: int,
    channels: int,
    arguments: Mapping[str, object] | None = None,
) -> nn.Module:
    """The classifier `name` of timm, with random weights. (n, channels, height, width) -> logits
    (n, classes).

    Args:
        name: with or without the tag of its weights, as in vit_base_patch32_224.augreg_in21k.
        arguments: of timm's function for the model, such as `drop_path_rate`.

    Raises:
        UserError: there is no such model, or it does not take the arguments or pictures.
    """
    import timm

    check_name(name)
    given = {"num_classes": classes, "in_chans": channels, **(arguments or {})}
    try:
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size:
            given.setdefault("img_size", (height, width))
        return timm.create_model(name, **given)
    except Exception as error:
        raise UserError(
            f"--model {name} cannot be built for pictures of {width}x{height} pixels"
            f"{_given(arguments)}: {one_line(error, 300)}"
        ) from None


def check_name(name: str) -> None:
    """UserError unless there is such a model: of timm, or "path/to/file.py:Class"."""
    if ":" in name:
        _find_class(name)
        return
    import timm

    if not timm.is_model(name.partition(".")[0]):
        raise UserError(
            f"--model {name}: timm {timm.__version__} has no such model{_near(name)}; "
            "--model list prints the names, and FILE.py:CLASS takes a class of your own"
        )


def own_class(place: str, classes: int, arguments: Mapping[str, object]) -> nn.Module:
    """An instance of a class of the user's: `Class(classes, **arguments)`, or `Class(**arguments)`
    if its constructor takes nothing else; `check_pictures` sees whether its answer fits.

    Args:
        place: "path/to/file.py:Class". The file may import others from its folder.

    Raises:
        UserError: it cannot be found, or its constructor fails.
    """
    found = _find_class(place)

    def made() -> nn.Module:
        # A constructor that takes nothing is called so.
        given = [classes] if inspect.signature(found).parameters.keys() - arguments else []
        return found(*given, **arguments)

    hint = "its constructor takes the number of classes, and --model_kwargs"
    return user_files.attempt(made, f"--model {place}: {found.__name__}(classes)", place, hint)


def _find_class(place: str) -> type[nn.Module]:
    def is_model(found: object) -> bool:
        return inspect.isclass(found) and issubclass(found, nn.Module)

    return user_files.find("--model", place, "nn.Module", "Net", is_model)


def check_pictures(
    model: nn.Module, name: str, classes: int, height: int, width: int, channels: int
) -> None:
    """Shows the model a blank picture. Raises UserError unless it answers with (1, classes)."""
    trains = model.training
    model.eval()
    try:
        # Not inference_mode: training goes on with what a model keeps of its first pass.
        with torch.no_grad():
            answer = model(torch.zeros(1, channels, height, width))
    except Exception as error:
        why = user_files.where(error, name) if ":" in name else f": {one_line(error, 300)}"
        raise UserError(
            f"--model {name} does not take pictures of {width}x{height} pixels in "
            f"{counted(channels, 'channel')}{why}"
        ) from None
    finally:
        model.train(trains)
    if not isinstance(answer, Tensor) or answer.shape != (1, classes):
        shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise UserError(f"--model {name} answers a picture with {shape}, not with (1, {classes})")


def check_training(model: nn.Module, name: str, height: int, width: int, channels: int) -> None:
    """Shows the model two blank pictures in training. Raises UserError if it answers with anything
    but a tensor. Changes neither its buffers nor PyTorch's random state."""
    pictures = torch.zeros(2, channels, height, width)
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            answer = functional_call(model, copies, (pictures,))
    except Exception:  # it may need larger batches; else the first step says what is wrong
        return
    if not isinstance(answer, Tensor):
        raise UserError(
            f"--model {name}: in training it answers with a {type(answer).__name__}; auxiliary "
            "heads are not supported: let it return the logits alone"
        )


def checkpoint_gradients(model: nn.Module, name: str) -> None:
    """Switches on gradient checkpointing (Chen et al., "Training deep nets with sublinear memory
    cost" (2016), arXiv:1604.06174). Raises UserError if the model has none."""
    try:
        model.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        raise UserError(
            f"--grad_checkpointing: {name} has no method set_grad_checkpointing; leave it out"
        ) from None


def arguments_of(text: str | None) -> dict[str, object]:
    """ "pos_drop_rate=0.1,qkv_bias=false" -> {"pos_drop_rate": 0.1, "qkv_bias": False}. The values
    are numbers, true, false, none or words. Raises UserError."""
    arguments = {}
    for pair in filter(None, (text or "").replace(",", " ").split()):
        name, equals, value = pair.partition("=")
        if not (equals and name.isidentifier() and value):
            raise UserError(
                f"--model_kwargs {pair}: write name=value, separated by commas, as in "
                "pos_drop_rate=0.1,proj_drop_rate=0.1"
            )
        arguments[name] = _value(value)
    return arguments


def is_vit(model: nn.Module) -> bool:
    """It is a Vision Transformer that `vit_weights` converts weights for."""
    ours = f"{PACKAGE}utils.models.vit"
    return type(model).__module__ in (ours, "timm.models.vision_transformer")


def convert_weights(
    model: nn.Module, tensors: dict[str, Tensor], size: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Weights for the same architecture from elsewhere, as `model` takes them: its own method
    `convert_weights` or, for a model of timm, timm's function brings them under its names and to
    the size of its pictures. Without either, and where timm fails with weights of another
    architecture, they are returned as they are.

    Args:
        size: (height, width) of the pictures that the weights were trained with; None: unknown.
    """
    if hasattr(model, "convert_weights"):
        return model.convert_weights(tensors, *[size] * is_vit(model))
    home = sys.modules[type(model).__module__]
    if not home.__name__.startswith("timm."):
        return tensors
    from .vit import by_timm, vit_weights

    if is_vit(model):
        return vit_weights(model, tensors, size)
    converter = next((getattr(home, n) for n in CONVERTERS if hasattr(home, n)), None)
    if converter is None:
        return tensors
    takes_model = len(inspect.signature(converter).parameters) > 1
    return by_timm(converter, tensors, *[model] * takes_model)


def _value(word: str) -> object:
    known = {"true": True, "false": False, "none": None}
    if word.lower() in known:
        return known[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _near(name: str) -> str:
    import timm

    near = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=3, cutoff=0.6)
    return f" (near: {', '.join(near)})" if near else ""


def _given(arguments: Mapping[str, object] | None) -> str:
    pairs = ",".join(f"{name}={value}" for name, value in (arguments or {}).items())
    return f" with --model_kwargs {pairs}" if pairs else ""
