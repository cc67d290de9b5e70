"""Reads files of weights, .safetensors and PyTorch's .pth, without running code hidden in them.

A `.pth` file is a pickle; `weights_only=True` admits tensors and plain containers only.
"""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from utils.errors import UserError
from utils.files import reason
from utils.weights.card import ModelCard, TextCard, card_of

CARD = "model_card"  # the only metadata key in our .safetensors files
# Keys under which training scripts keep the weights in a .pth file. Averaged weights come first:
# those scripts evaluate them (timm: "state_dict_ema", torchvision's references: "model_ema").
NESTS = (
    "state_dict_ema", "model_ema", "state_dict", "model", "module", "model_state_dict",
    "model_state", "net", "weights",
)  # fmt: skip
# Prefixes that DistributedDataParallel, torch.compile and Lightning add to every name.
PREFIXES = ("module.", "_orig_mod.", "model.")


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], ModelCard | TextCard | None]:
    """The tensors, and the card in the metadata; None in files that we did not export."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(CARD)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(_unreadable(path, str(error))) from None
    if text is None:
        return canonical(tensors, str(path)), None
    try:
        return tensors, card_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its metadata is damaged ({error}): export it again") from None


def read_pth(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors under canonical names, and the keys that led to them, as "model" or ""."""
    try:
        # torchvision's training script saves its arguments beside the weights. Unpickling a
        # Namespace only sets its attributes.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:  # a damaged file can make PyTorch raise any exception
        foreign = re.search(r"GLOBAL ([\w.]+) (?:was|whose)", str(error))
        if foreign:
            raise UserError(
                f"{path} holds {foreign[1]}, which is not loaded because it could run any code: "
                "where the file was made, save only the weights, "
                "torch.save(model.state_dict(), path)"
            ) from None
        what = error.strerror if isinstance(error, OSError) and error.strerror else "not PyTorch's"
        raise UserError(_unreadable(path, what)) from None
    nests = []
    while isinstance(content, Mapping):
        nest = next((key for key in NESTS if isinstance(content.get(key), Mapping)), None)
        if nest is None:
            break
        nests.append(nest)
        content = content[nest]
    return canonical(content, str(path)), "/".join(nests)


def canonical(content, source: str) -> dict[str, Tensor]:
    """The tensors in `content`, by their names without the prefixes of wrappers.

    Raises UserError, which names `source`, for anything but a mapping with dense tensors.
    """
    named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not named or not any(isinstance(value, Tensor) for value in content.values()):
        keys = ", ".join(map(repr, content)) if named else ""
        have = f" (its keys are {keys[:200]})" if keys else ""
        raise UserError(
            f"{source} holds no named weights{have}: where the file was made, save only the "
            "weights, torch.save(model.state_dict(), path)"
        )
    tensors = {}
    for name, tensor in content.items():
        # "n_averaged" is a counter of torch.optim.swa_utils.AveragedModel.
        if name == "n_averaged" or not isinstance(tensor, Tensor):
            continue
        short = name
        while prefix := next((p for p in PREFIXES if short.startswith(p)), None):
            short = short.removeprefix(prefix)
        if short in tensors:
            raise UserError(
                f"{source} has {short} twice, with and without a prefix: save the weights of only "
                "one model"
            )
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.is_quantized or tensor.is_complex():
            raise UserError(
                f"{source}: {name} is no dense tensor of real numbers: save the model before it is "
                "made sparse or quantized"
            )
        tensors[short] = tensor.detach()
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
