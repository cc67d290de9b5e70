"""Reads files of weights, .safetensors and PyTorch's .pth, without running code hidden in them.

A `.pth` file is a pickle; `weights_only=True` admits tensors and plain containers only. Whatever
else is in it, as among the hyperparameters of Lightning, is not imported (`_Ignored`).
"""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..files import reason
from .card import ModelCard, TextCard, card_of

CARD = "model_card"  # the only metadata key in our .safetensors files
# Keys under which training scripts keep the weights in a .pth file. Averaged weights come first:
# those scripts evaluate them (timm: "state_dict_ema", torchvision's references: "model_ema").
NESTS = (
    "state_dict_ema", "model_ema", "state_dict", "model", "module", "model_state_dict",
    "model_state", "net", "weights",
)  # fmt: skip
NOT_LOADED = "not loaded, as it could run any code"
ADVICE = "where the file was made, save only the weights, torch.save(model.state_dict(), path)"


class _EqualsDict(type):  # as the unpickler adds items only to what is of the class dict
    __hash__ = type.__hash__

    def __eq__(cls, other):
        return other is cls or other is dict


class _Ignored(dict, metaclass=_EqualsDict):  # in place of what is not imported
    __hash__ = object.__hash__  # type: ignore[assignment]
    __init__ = __setstate__ = lambda self, *args, **kwargs: None  # type: ignore[assignment]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], ModelCard | TextCard | None]:
    """The tensors, and the card in the metadata; None in files that we did not export."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(CARD)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(_unreadable(path, str(error))) from None
    if text is None:
        return dense_tensors(tensors, str(path)), None
    try:
        return tensors, card_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its metadata is damaged ({error}): export it again") from None


def read_pth(path: Path, say: Callable = print, part: str = "") -> tuple[dict[str, Tensor], str]:
    """The tensors, and the keys that led to them, as "model" or "".

    Args:
        say: is given a line on what is not loaded.
        part: the key of the mapping that is meant; "" or none of its keys: one that is usual.
    """
    zipped, foreign = zipfile.is_zipfile(path), []
    try:
        # torchvision's training script saves its arguments beside the weights. Unpickling a
        # Namespace only sets its attributes.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if zipped:
                foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            with torch.serialization.safe_globals([(_Ignored, name) for name in foreign]):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a damaged file can make PyTorch raise any exception
        found = re.search(r"GLOBAL ([\w.]+) (?:was|whose)", str(error))
        if name := found[1] if found else ", ".join(foreign[:3]):
            raise UserError(f"{path} holds {name} ({NOT_LOADED}): {ADVICE}") from None
        what = error.strerror if isinstance(error, OSError) and error.strerror else "not PyTorch's"
        raise UserError(_unreadable(path, what)) from None
    nests = []
    while isinstance(content, Mapping) and (
        keys := [key for key in (part, *NESTS) if isinstance(content.get(key), Mapping)]
    ):
        nests.append(keys[0])
        content = content[keys[0]]
    tensors = dense_tensors(content, str(path), *foreign)
    if foreign:
        say(f"note: {path} also holds {', '.join(foreign[:3])} ({NOT_LOADED})")
    return tensors, "/".join(nests)


def dense_tensors(content, source: str, *foreign: str) -> dict[str, Tensor]:
    """The tensors in `content`, or in the mappings within it, by name. UserError, which names
    `source` and what was not loaded, `foreign`, for anything but named, dense tensors."""
    named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    keys = f" (its keys are {', '.join(map(repr, content))[:200]})" if named and content else ""
    if named and not any(isinstance(value, Tensor) for value in content.values()):
        parts = [(key, part) for key, part in content.items() if isinstance(part, Mapping)]
        content = {f"{key}.{name}": tensor for key, part in parts for name, tensor in part.items()}
    tensors = {}
    for name, tensor in content.items() if named else ():
        # "n_averaged" is a counter of torch.optim.swa_utils.AveragedModel.
        if name == "n_averaged" or not isinstance(tensor, Tensor):
            continue
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.is_quantized or tensor.is_complex():
            raise UserError(
                f"{source}: {name} is no dense tensor of real numbers: save the model before it is "
                "made sparse or quantized"
            )
        tensors[name] = tensor.detach()
    if not tensors:
        have = f" (it holds {foreign[0]}, {NOT_LOADED})" if foreign else keys
        raise UserError(f"{source} holds no named weights{have}: {ADVICE}")
    return tensors


def _unreadable(path: Path, why: str) -> str:
    """A message on a file that cannot be read; its first bytes show the usual causes."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError as error:
        return f"{path}: {reason(error)}; give a file that can be read"
    if not size:
        return f"{path} is empty: download or save it again"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{path} is a web page, not weights: download the file itself, from its direct link"
    if start.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not weights: get the file itself with git lfs pull"
    why = " ".join(why.split())[:200]
    return f"{path} is damaged or not a file of weights ({why}): download or save it again"
