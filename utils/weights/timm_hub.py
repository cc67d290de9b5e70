"""Weights that timm has published, downloaded once into the cache of the Hugging Face hub."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from utils.errors import UserError
from utils.weights.files import dense_tensors, read_pth, read_safetensors
from utils.weights.pretrained import HUB_FILES, Pretrained


def load_timm(name: str, say: Callable = print) -> Pretrained:
    """The weights of timm's model `name`; those of its default tag, if the name has none.

    The environment variable `HF_HOME` says where downloads are kept.

    Args:
        say: is given a line before a download.

    Raises:
        UserError: there are none; when they are fetched: they cannot be downloaded, or are damaged.
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
    load = _from_hub if config.hf_hub_id else _from_url
    source = f"timm's weights {config.architecture}.{config.tag}"
    return Pretrained(
        lambda: dense_tensors(load(config, say), source), source,
        tuple(config.mean), tuple(config.std),
    )  # fmt: skip


def _from_hub(config, say: Callable) -> dict:
    from huggingface_hub import constants

    repository, _, revision = config.hf_hub_id.partition("@")
    files = [config.hf_hub_filename] if config.hf_hub_filename else HUB_FILES
    try:
        with _silent("huggingface_hub"):  # it warns of every attempt
            file = _fetch(repository, files, revision or "main", say)
    except Exception as error:  # network or disk
        raise UserError(
            f"--pretrained: cannot fetch {config.hf_hub_id} ({_cause(error)}); where there is a "
            f"network, download https://huggingface.co/{repository}/resolve/{revision or 'main'}/"
            f"{files[0]} and give that file by --pretrained, or copy the folder "
            f"models--{repository.replace('/', '--')} into {constants.HF_HUB_CACHE}"
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


def _from_url(config, say: Callable) -> dict:
    import torch

    file = Path(torch.hub.get_dir(), "checkpoints", config.url.rpartition("/")[2])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return torch.hub.load_state_dict_from_url(
                config.url,
                map_location="cpu",
                progress=sys.stderr.isatty(),
                # Most names end with the start of the file's SHA-256.
                check_hash=re.search(r"-[0-9a-f]{8,}\.", config.url) is not None,
                weights_only=True,
            )
    except Exception as error:  # network, disk or a damaged file
        raise UserError(
            f"--pretrained: cannot fetch {config.url} ({_cause(error)}); download it elsewhere and "
            f"give the file, or put it at {file}"
        ) from None


@contextlib.contextmanager
def _silent(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(str(error).split())[:200] or type(error).__name__
