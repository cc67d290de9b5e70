"""Weights that torchvision and timm have published, downloaded once, when they are needed.

The environment variables `TORCH_HOME` (PyTorch) and `HF_HOME` (the Hugging Face hub) say where
downloads are kept.
"""

import contextlib
import logging
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..errors import UserError, network_cause, one_line
from ..machine.packages import is_installed, require
from ..settings.transfer import OF_TORCHVISION
from .files import dense_tensors, read_pth, read_safetensors
from .pretrained import HUB_FILES, Pretrained

TIMEOUT_S = 30  # longest wait for the next byte of a download
ASK_S = 5  # longest wait for the hub's answer whether it has a repository


def load_imagenet(
    architecture: str, source: str = "imagenet", say: Callable | None = None
) -> Pretrained:
    """torchvision's ImageNet weights for `architecture`, its name of the model.

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
        lambda: dense_tensors(_from_url(weights.url, "--pretrained imagenet"), text), text,
        tuple(transforms.mean), tuple(transforms.std),
    )  # fmt: skip


def load_timm(name: str, say: Callable = print) -> Pretrained:
    """The weights of timm's model `name`; those of its default tag, if the name has none.

    Args:
        say: is given a line before a download from the hub.

    Raises:
        UserError: there are none, or the package for the hub is missing; when they are fetched:
            they cannot be downloaded, or are damaged.
    """
    import timm

    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # it knows no such tag
        config = None
    if config is None or not (config.hf_hub_id or config.url):
        tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        raise UserError(
            f"--pretrained: timm has published no weights for {name}"
            + (f"; there are {', '.join(tags)}" if tags else "; give a run or a file")
        )

    if config.hf_hub_id:
        require("--pretrained", "huggingface_hub")

    def fetched() -> dict:
        of_hub = config.hf_hub_id
        return _from_hub(config, say) if of_hub else _from_url(config.url, "--pretrained")

    source = f"timm's weights {config.architecture}.{config.tag}"
    mean, std = tuple(config.mean), tuple(config.std)
    return Pretrained(lambda: dense_tensors(fetched(), source), source, mean, std)


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


def _from_url(url: str, flag: str) -> dict:
    cached = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # else PyTorch waits forever
    try:
        # PyTorch announces the download on stdout, which is for results.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.hub.load_state_dict_from_url(
                url,
                map_location="cpu",
                progress=sys.stderr.isatty(),
                # Most names, and all of torchvision's, end with the start of the file's SHA-256.
                check_hash=re.search(r"-[0-9a-f]{8,}\.", url) is not None,
                weights_only=True,
            )
    except Exception as error:  # network, disk, checksum or unpickler
        if cached.exists():
            raise UserError(
                f"{cached} cannot be read ({one_line(error, 200)}): if it is damaged, remove it, "
                "and it will be downloaded again"
            ) from error
        raise UserError(
            f"{flag}: cannot download {url}: {network_cause(error)}; download it elsewhere and "
            f"give the file, or put it at {cached}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_before)


def _from_hub(config, say: Callable) -> dict:
    from huggingface_hub import constants

    repository, _, revision = config.hf_hub_id.partition("@")
    files = [config.hf_hub_filename] if config.hf_hub_filename else HUB_FILES
    try:
        with _silent("huggingface_hub"):  # it warns of every attempt
            file = _fetch(repository, files, revision or "main", say)
    except Exception as error:  # network or disk
        raise UserError(
            f"--pretrained: cannot fetch {config.hf_hub_id} ({_first_cause(error)}); where there "
            f"is a network, download https://huggingface.co/{repository}/resolve/"
            f"{revision or 'main'}/{files[0]} and give that file by --pretrained, or copy the "
            f"folder models--{repository.replace('/', '--')} into {constants.HF_HUB_CACHE}"
        ) from None
    return read_safetensors(file)[0] if file.suffix == ".safetensors" else read_pth(file, say)[0]


def _fetch(repository: str, files: Sequence[str], revision: str, say: Callable) -> Path:
    """The first of these files that the repository has: from the hub's cache, or downloaded into
    it."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in files:  # without a network, the hub's own look at its cache takes a minute
        if isinstance(path := try_to_load_from_cache(repository, file, revision=revision), str):
            return Path(path)
    say(f"fetching {repository} from the Hugging Face hub")
    for file in files[:-1]:
        try:
            return Path(hf_hub_download(repository, file, revision=revision))
        except LocalEntryNotFoundError:  # no network
            raise
        except EntryNotFoundError:
            continue
    return Path(hf_hub_download(repository, files[-1], revision=revision))


def fetch_folder(name: str, flag: str, patterns: Sequence[str], say: Callable) -> Path:
    """The files of a repository on the hub that match one of `patterns`: from the hub's cache, or
    downloaded into it.

    Args:
        name: owner/name or owner/name@revision.
        flag: that asks for it, for messages.
        say: is given a line before a download.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", name):
        raise UserError(f"{flag}: there is no such folder, and it is no name on the hub")
    require(flag, "huggingface_hub")
    from huggingface_hub import constants, snapshot_download

    repository, _, revision = name.partition("@")
    what = {"repo_id": repository, "revision": revision or None, "allow_patterns": [*patterns]}
    with contextlib.suppress(Exception):  # it is not in the cache
        folder = Path(snapshot_download(**what, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    say(f"fetching {name} from the Hugging Face hub")
    try:
        with _silent("huggingface_hub"):
            return Path(snapshot_download(**what))
    except Exception as error:  # network or disk
        raise UserError(
            f"{flag}: there is no such folder, and it cannot be fetched from the hub "
            f"({_first_cause(error)}); where there is a network, run "
            f"hf download {repository} --local-dir FOLDER and give that folder, or copy "
            f"models--{repository.replace('/', '--')} into {constants.HF_HUB_CACHE}"
        ) from None


def is_on_hub(name: str) -> bool:
    """Whether the weights of a repository can be had: from the hub's cache, or from the hub."""
    if not is_installed("huggingface_hub"):
        return False
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
        return True
    try:
        HfApi().model_info(name, timeout=ASK_S)
    except Exception:  # whatever keeps it from being fetched
        return False
    return True


def _first_cause(error: BaseException) -> str:
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return one_line(error, 200)


@contextlib.contextmanager
def _silent(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
