"""torchvision's ImageNet weights, downloaded once."""

import contextlib
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from utils.errors import UserError
from utils.settings.transfer import OF_TORCHVISION
from utils.weights.files import dense_tensors
from utils.weights.pretrained import Pretrained

TIMEOUT_S = 30  # longest wait for the next byte of a download


def load_imagenet(
    architecture: str, source: str = "imagenet", say: Callable | None = None
) -> Pretrained:
    """Loads the weights for `architecture`, torchvision's name; downloaded when they are needed.

    The environment variable `TORCH_HOME` says where downloads are kept.

    Args:
        source: which of them: a value of --pretrained for which `is_published` holds.
        say: is given a line on the pictures for which they were published.

    Raises:
        UserError: there are none of this name; when they are fetched: the download fails, or the
            file is damaged.
    """
    weights = _named(architecture, source)
    transforms = weights.transforms()
    if say is not None:
        (size,), (resized,) = transforms.crop_size, transforms.resize_size
        say(f"published for --image_size {size} --crop_ratio {size / resized:.3g}")
    text = f"ImageNet weights of {architecture} ({weights.name})"
    return Pretrained(
        lambda: dense_tensors(_fetch(weights), text), text,
        tuple(transforms.mean), tuple(transforms.std),
    )  # fmt: skip


def _fetch(weights) -> dict:
    cached = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # else PyTorch waits forever
    try:
        # PyTorch announces the download on stdout, which is for results.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.hub.load_state_dict_from_url(
                weights.url,
                map_location="cpu",
                progress=sys.stderr.isatty(),
                check_hash=True,
                weights_only=True,
            )
    except Exception as error:  # network, disk, checksum or unpickler
        if cached.exists():
            raise UserError(
                f"{cached} is damaged: remove it, and it will be downloaded again"
            ) from error
        cause = getattr(error, "reason", error)
        text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise UserError(
            f"--pretrained imagenet: cannot download {weights.url}: "
            f"{' '.join(text.split())}; download it elsewhere and give the file, or put it at "
            f"{cached}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_before)


def _named(architecture: str, source: str):
    """torchvision's description of the weights that `source` names."""
    from torchvision.models import get_model_weights  # slow to import

    published, named = get_model_weights(architecture), OF_TORCHVISION.fullmatch(source)
    if named is None:
        return published.DEFAULT
    if named["model"] not in (None, published.__name__.removesuffix("_Weights")):
        raise UserError(
            f"--pretrained {source}: this model is {architecture}; give --depth, or leave the part "
            "before the dot out"
        )
    if named["version"] not in published.__members__:
        names = ", ".join(published.__members__)
        raise UserError(f"--pretrained {source}: torchvision has {names} for {architecture}")
    return published[named["version"]]
