"""The loaders of pictures: batches, augmentation, and the processes that read ahead."""

import math
import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..data.images.dali import DaliReader
from ..data.images.image_data import PictureSplit
from ..data.images.loader import Normalize
from ..data.loader import Loader
from ..data.workers import WorkerPool
from ..errors import UserError
from ..exchange import Exchange
from ..local.workers import Workers
from ..machine.cores import usable_cores
from ..machine.host_memory import available_memory
from ..pieces import largest_piece
from ..plural import counted
from ..reporting.console import Console
from ..settings import ImageSettings
from ..weights.card import ModelCard
from .augmentation import augmentation
from .mixing import auto_split, build_mixing
from .picture_data import Splits
from .sample_names import picture_names
from .simple_models import PixelModel
from .task import Task

# Most workers if --workers is not given: even two read faster than a GPU trains a small network.
AUTOMATIC_WORKERS = 4
PIXELS = 5000 * 32**2  # of the pictures of which a first layer takes statistics
MOST_DECODERS = 16  # likewise, for pictures that are decoded while training


@dataclass(frozen=True)
class ImageTask(Task):
    """A task of pictures. `close` ends its worker processes."""

    SKIPPED = "skipped_files"

    pool: WorkerPool | None = None

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        if self.pool is not None:
            self.pool.close()

    def resize_evaluation(self, batch_size: int, ranks: int) -> None:
        """Also makes room in the worker processes for batches of this size."""
        super().resize_evaluation(batch_size, ranks)
        if self.pool is not None:
            self.pool.resize(largest_batch(batch_size, self.data.train, self.data.test))

    def usual_sample(self) -> torch.Tensor:
        """(1, channels, height, width) float32."""
        height, width, channels = self.data.train.shape
        return torch.zeros(1, channels, height, width)

    def usual_pictures(self) -> torch.Tensor:
        """Some from all over the training split, normalised: (n, channels, height, width)
        float32. UserError: one cannot be read."""
        split = self.simple_model.splits["train"]
        height, width, channels = split.shape
        most = min(len(split), max(1, PIXELS // (height * width)))
        index = np.linspace(0, len(split) - 1, most).round().astype(int)
        rows = index if split.rows is None else split.rows[index]
        pictures = torch.from_numpy(np.stack([split.picture(row) for row in rows.tolist()]))
        normalize = Normalize(self.card.mean, self.card.std, width, torch.device("cpu"), False)
        return normalize(pictures.view(-1, height, width, channels))


def make_loaders(
    settings: ImageSettings,
    splits: Splits,
    card: ModelCard,
    device: torch.device,
    console: Console,
    exchange: Exchange,
    workers: Workers,
) -> ImageTask:
    """The task with loaders of these splits, as the settings say.

    Args:
        card: by whose mean and standard deviation pictures are normalised.
        exchange: with the other ranks.
        workers: among whom training steps are divided.
    """
    data, train, val = splits
    pool, decoding = _decoding(settings, train, data.test, device, console)
    _check_repeats(settings, len(train), workers)

    def loader(split: PictureSplit, pool=pool, **options) -> Loader:
        ranks = {"rank": exchange.rank, "ranks": exchange.size}
        return split.loader(
            pool=pool,
            mean=card.mean,
            std=card.std,
            batch_size=settings.batch_size,
            device=device,
            channels_last=settings.channels_last,
            least=1 if settings.sync_bn else 2,
            **decoding,
            **ranks | options,
        )

    named = {"train": train, "val": val, "test": data.test}
    named = {name: split for name, split in named.items() if split is not None}
    names = {name: picture_names(split) for name, split in named.items()}
    val_loader = loader(val) if val else None
    test_loader = val_loader if val is data.test else loader(data.test)
    if settings.eval_data:  # nothing is trained
        return ImageTask(data, card, test_loader, test_loader, None, pool=pool, names=names)
    auto = auto_split(settings, train.labels)
    height, width, _ = train.shape
    return ImageTask(
        data,
        card,
        train=loader(
            train,
            rank=workers.own[0],
            ranks=workers.size,
            accumulation=settings.accumulation_steps,
            step_size=settings.global_batch,
            drop_last=settings.drop_last,
            **augmentation(settings, card.mean, train),
            **({"repeats": settings.ra_reps} if settings.ra_reps > 1 else {}),
            shuffle=True,
            seed=settings.seed,
            mixing=build_mixing(
                settings,
                height,
                width,
                strength=None if auto is None else auto.strength,
                workers=workers.size,
                say=console.say,
            ),
            hold_out=auto and auto.hold_out,
            by_class=settings.class_sampler == "balanced",
        ),
        test=test_loader,
        val=val_loader,
        auto=auto,
        # Without the pool: they are read in the middle of a training epoch, for which the pool
        # reads ahead.
        held_out=None if auto is None else loader(train.part(auto.held_out), pool=None),
        trained=None if auto is None else loader(train.part(auto.trained), pool=None),
        pool=pool,
        names=names,
        simple_model=PixelModel(named, data.fingerprint),
    )


def _check_repeats(settings: ImageSettings, samples: int, workers: Workers) -> None:
    """UserError if a picture's copies do not fit into an optimizer step. Runs from before there was
    this check can still be resumed."""
    step = settings.batch_size * settings.accumulation_steps * workers.size
    most = min(settings.global_batch or step, samples)
    if settings.ra_reps > most and settings.action.trains and settings.resume is None:
        raise UserError(
            f"--ra_reps {settings.ra_reps}: a picture's copies share an optimizer step, which has "
            f"{counted(most, 'sample')}: take at most {most}"
        )


def _decoding(
    settings: ImageSettings,
    train: PictureSplit,
    test: PictureSplit,
    device: torch.device,
    console: Console,
) -> tuple[WorkerPool | None, dict]:
    """(processes that read pictures, if there are any; options of `PictureSplit.loader`)."""
    workers = _workers(settings, train)
    if settings.loader == "dali" and device.type == "cuda":
        # One process decodes on the GPU; these are its threads.
        reader = partial(DaliReader, device=device.index or 0, threads=max(1, workers))
        return None, {"reader": reader}
    if settings.loader == "dali":
        console.say("note: --loader dali is for NVIDIA GPUs: on a CPU the workers decode")
    if not workers:
        return None, {}
    largest = largest_batch(settings.batch_size, train, test)
    return WorkerPool(workers, largest, warn=console.say, ranks=_ranks_here()), {}


def _ranks_here() -> int:
    """Ranks on this machine, which share its cores and its shared memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _workers(settings: ImageSettings, train: PictureSplit) -> int:
    """Processes that read pictures. 0 if the pictures are in memory, --workers is 0, or it is not
    given and the pictures are decoded and take at most half of the available memory."""
    if not train.on_disk:
        return 0
    if settings.workers is not None:
        return settings.workers
    if train.encoded:
        return max(1, min(MOST_DECODERS, usable_cores() // _ranks_here()))
    large = len(train) * math.prod(train.shape) > available_memory() / 2
    return min(AUTOMATIC_WORKERS, usable_cores()) if large else 0


def largest_batch(batch_size: int, *splits: PictureSplit) -> int:
    """Bytes of the pictures in the largest micro-batch."""
    return largest_piece(batch_size) * max(math.prod(split.shape) for split in splits)
