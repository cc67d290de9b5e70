"""Tasks of pictures: data set, splits and loaders, from the settings."""

import dataclasses
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.class_names import names_notes
from ..data.images.dali import DaliGpuReader, DaliReader, require_dali
from ..data.images.image_data import ImageData, PictureRequest, PictureSplit
from ..data.images.sources import load_image_data
from ..data.loader import Loader
from ..data.splits import stratified_split, stratified_subset
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
from ..settings.transfer import OF_TORCHVISION
from ..weights.card import ModelCard
from ..weights.pretrained import Pretrained
from ..weights.published import load_imagenet, load_timm
from .augmentation import augmentation
from .kinds import Kind
from .mixing import auto_split, build_mixing
from .task import Task, counts_text

# Most workers if --workers is not given: even two read faster than a GPU trains a small network.
AUTOMATIC_WORKERS = 4
MOST_DECODERS = 16  # likewise, for pictures that are decoded while training
# What the settings and PictureRequest name alike.
OF_REQUEST = (
    *("image_size", "on_bad", "test_fraction", "decode", "form", "workers"),
    *("encoding", "image_column", "label_column", "image_dir"),
    *("group_column", "group_by", "val_fraction"),
)


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


def load_image_task(
    settings: ImageSettings,
    device: torch.device,
    console: Console,
    source=None,
    exchange: Exchange | None = None,
    workers: Workers | None = None,
) -> ImageTask:
    """Loads the data set, splits it and makes the loaders, all as `settings` say.

    Args:
        source: the ModelCard or Pretrained that came with the weights; pictures are normalised by
            its mean and standard deviation. None, or one without these: by those of the data set.
        exchange: with the other ranks; None: a single process.
        workers: among whom training steps are divided; None: the ranks.
    """
    if settings.loader == "dali":
        require_dali()
    exchange = exchange or Exchange()
    workers = workers or Workers.divide(exchange.size, exchange.rank, exchange.size)
    measured = settings.eval_data
    if measured:
        settings = _for_all_of(measured, settings, source)
    with exchange.in_turn():  # one rank downloads and decodes, the others find it done
        request = PictureRequest(
            Path(settings.data_dir),
            Path(settings.cache_dir),
            classes=list(source.classes) if measured else None,
            **{name: getattr(settings, name) for name in OF_REQUEST},
        )
        data = load_image_data(settings.dataset, request)
    data = _take_val(data, settings, console)
    train, val = _divide(data, settings)
    height, width, channels = train.shape
    if settings.eval_size not in (None, height):
        data, val = _resized(data, val, settings.eval_size)
    console.say(_description(data, None if measured else train, val))
    groups = getattr(data.train, "groups", None)
    for note in [*data.notes, *(groups.notes if groups else ()), *names_notes(data.classes)]:
        console.say(f"note: {note}")
    normalisation = source and source.normalisation(channels)
    mean, std = normalisation or (data.mean, data.std)
    shape = data.test.shape  # as the model is used
    card = ModelCard(tuple(data.classes), mean, std, *shape, settings.heads_of_vit)
    decoding = _decoding(settings, train, data.test, device, console)
    pool, auto = decoding.pool, auto_split(settings, train.labels)
    _check_repeats(settings, len(train), workers)

    def loader(split: PictureSplit, pool=pool, **options) -> Loader:
        ranks = {"rank": exchange.rank, "ranks": exchange.size}
        return split.loader(
            pool=pool,
            mean=mean,
            std=std,
            batch_size=settings.batch_size,
            device=device,
            channels_last=settings.channels_last,
            least=1 if settings.sync_bn else 2,
            **decoding.options,
            **ranks | options,
        )

    val_loader = loader(val) if val else None
    test_loader = val_loader if val is data.test else loader(data.test)
    if measured:
        return ImageTask(data, card, test_loader, test_loader, None, pool=pool)
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
        ),
        test=test_loader,
        val=val_loader,
        auto=auto,
        # Without the pool: they are read in the middle of a training epoch, for which the pool
        # reads ahead.
        held_out=None if auto is None else loader(train.part(auto.held_out), pool=None),
        trained=None if auto is None else loader(train.part(auto.trained), pool=None),
        pool=pool,
    )


def _for_all_of(path: str, settings: ImageSettings, card: ModelCard) -> ImageSettings:
    """Settings by which all of `path` is read for the trained model whose card this is."""
    if not os.path.exists(path):
        raise UserError(f"--eval_data {path}: there is no such file or folder")
    if card.channels != 3:
        raise UserError(f"--eval_data {path}: the model takes gray pictures; use --predict")
    kind = "csv" if os.path.isfile(path) else "imagefolder"
    changed: dict[str, Any] = {"dataset": kind, "data_dir": path, "image_size": card.height}
    changed |= dict.fromkeys(("eval_size", "test_fraction", "subset"))
    changed |= {"val_fraction": 0.0, "val_is_validation": False, "mixup": "none"}
    changed |= dict.fromkeys(("group_by", "group_column"), "none")
    return dataclasses.replace(settings, **changed)


def _take_val(data: ImageData, settings: ImageSettings, console: Console) -> ImageData:
    """Makes a val/ folder without test/ beside it the validation split, with --val_is_validation;
    else says that it is the test set."""
    if settings.val_is_validation and not data.val_is_test:
        raise UserError(
            f"--val_is_validation is for train/ and val/ alone, which {settings.data_dir} does not "
            "have: leave the flag out"
        )
    if settings.val_is_validation:
        return dataclasses.replace(data, val=data.test)
    if data.val_is_test:
        console.say(
            "note: val/ is used as the test set and influences nothing; with --val_is_validation "
            "it becomes the validation split, which selects the best weights and controls early "
            "stopping"
        )
    return data


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


def _divide(data: ImageData, settings: ImageSettings) -> tuple[PictureSplit, PictureSplit | None]:
    """(training split, validation split). Validation pictures are held out of the training
    pictures before --subset is taken of the rest."""
    chosen, val, labels = np.arange(len(data.train)), data.val, data.train.labels
    if settings.val_fraction and val is not None:
        raise UserError(
            f"--val_fraction: {settings.data_dir} has a validation split of its own; leave the "
            "flag out"
        )
    if settings.val_fraction:
        groups = getattr(data.train, "groups", None)  # of the user's own files
        chosen, held_out = stratified_split(
            labels, settings.val_fraction, settings.seed, data.classes, groups
        )
        val = data.train.part(held_out)
    if settings.subset is not None:
        amount = settings.subset if settings.subset <= 1 else int(settings.subset)
        chosen = chosen[stratified_subset(labels[chosen], amount, settings.seed)]
    return data.train if len(chosen) == len(data.train) else data.train.part(chosen), val


def _resized(data: ImageData, val: Any, size: int) -> tuple[ImageData, PictureSplit | None]:
    """`data` with encoded test pictures of another size, and the validation split likewise."""
    test = data.test.resized(size)  # type: ignore[attr-defined]  # encoded ones have it
    if val is not None:
        val = test if val is data.test else val.resized(size)
    return dataclasses.replace(data, test=test), val


def _description(data: ImageData, train: PictureSplit | None, val: PictureSplit | None) -> str:
    note = f", {counted(data.skipped, 'bad file')} left out" if data.skipped else ""
    test = None if val is data.test else data.test  # --val_is_validation
    counts = counts_text("pictures", train, val, test)
    return f"{data.name}{note}: {counts} of {len(data.classes)} classes from {data.source}"


class _Decoding(NamedTuple):
    """How the loaders read pictures."""

    pool: WorkerPool | None
    options: dict  # of `PictureSplit.loader`


def _decoding(
    settings: ImageSettings,
    train: PictureSplit,
    test: PictureSplit,
    device: torch.device,
    console: Console,
) -> _Decoding:
    workers = _workers(settings, train)
    options = {}
    if settings.loader == "dali" and device.type == "cuda":
        # One process decodes on the GPU; these are its threads.
        reader = partial(DaliGpuReader, device=device.index or 0, threads=max(1, workers))
        return _Decoding(None, {"reader": reader})
    if settings.loader == "dali":
        options["reader"] = DaliReader
    largest = largest_batch(settings.batch_size, train, test)
    if not workers:
        return _Decoding(None, options)
    pool = WorkerPool(workers, largest, warn=console.say, ranks=_ranks_here())
    return _Decoding(pool, options)


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


# ---- for runs -----------------------------------------------------------------------------------


class Pictures(Kind):
    """The kind of task whose samples are pictures."""

    card_class = ModelCard

    def build_model(self, card: ModelCard):
        last = self.settings.channels_last
        memory_format = torch.channels_last if last else torch.contiguous_format
        return super().build_model(card).to(memory_format=memory_format)

    def load_published(self, say) -> Pretrained:
        settings = self.settings
        if settings.published_weights is None:
            where = settings.published_for
            way_out = f"there are for {where}" if where else "give a run or a file"
            raise UserError(
                f"--pretrained {settings.pretrained}: no weights are published for "
                f"{self.model_name}; {way_out}"
            )
        library, name = settings.published_weights
        if library == "timm":
            if OF_TORCHVISION.fullmatch(settings.pretrained):
                raise UserError(
                    f"--pretrained {settings.pretrained} is a name of torchvision's weights, and "
                    f"those of {name} are timm's: --pretrained published"
                )
            return load_timm(name, say)
        return load_imagenet(name, settings.pretrained, None if settings.action.trains else say)

    def load_task(self, run, card, pretrained) -> ImageTask:
        ours = self.settings.heads_of_vit
        theirs = pretrained and pretrained.card and pretrained.card.heads
        if ours is not None and theirs not in (None, ours):
            raise UserError(
                f"--pretrained {self.settings.pretrained}: its weights were trained with --heads "
                f"{theirs}; give that too"
            )
        if ours is not None and pretrained and theirs is None:
            run.console.say(
                f"note: these weights do not show their number of heads; --heads {ours} is used"
            )
        return run.close_at_end(
            load_image_task(
                self.settings,
                run.device,
                run.console,
                card or pretrained,
                run.exchange,
                run.workers,
            )
        )
