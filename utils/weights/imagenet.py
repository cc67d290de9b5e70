"""torchvision's ImageNet weights, downloaded once."""

import contextlib
import socket
import sys
import warnings
from pathlib import Path

import torch

from utils.errors import UserError
from utils.weights.files import canonical
from utils.weights.pretrained import Pretrained

TIMEOUT_S = 30  # longest wait for the next byte of a download


def load_imagenet(architecture: str) -> Pretrained:
    """Loads the weights for `architecture`, torchvision's name; downloads them if necessary.

    The environment variable `TORCH_HOME` says where downloads are kept.

    Raises:
        UserError: the download fails, or the file is damaged.
    """
    from torchvision.models import get_model_weights  # slow to import

    weights = get_model_weights(architecture).DEFAULT
    cached = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # else PyTorch waits forever
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
    transforms = weights.transforms()
    source = f"ImageNet weights of {architecture} ({weights.name})"
    return Pretrained(
        canonical(tensors, source), source, tuple(transforms.mean), tuple(transforms.std)
    )
