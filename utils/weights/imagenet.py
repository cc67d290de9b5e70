"""torchvision's ImageNet weights, downloaded once."""

import contextlib
import socket
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from utils.errors import UserError
from utils.weights.files import canonical
from utils.weights.pretrained import Pretrained

TIMEOUT_S = 30  # of a download, without a single byte


def torchvision_name(model: nn.Module, model_name: str) -> str:
    """What torchvision calls the architecture of `model`, in these settings called `model_name`.

    A model of whose class torchvision has weights says so: `torchvision_name` is that name, or None
    for an architecture without weights, and `PUBLISHED` names those with weights, as flags.

    Raises:
        UserError: torchvision has no weights for it.
    """
    name = getattr(model, "torchvision_name", None)
    if name is None:
        published = getattr(model, "PUBLISHED", "")
        raise UserError(
            f"--pretrained imagenet: there are no ImageNet weights of {model_name}; "
            + (f"they are of {published}" if published else "name a run or a file")
        )
    return name


def load_imagenet(architecture: str) -> Pretrained:
    """The weights of this architecture, in torchvision's name for it; `TORCH_HOME` says where they
    are kept.

    Raises:
        UserError: they cannot be had.
    """
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
