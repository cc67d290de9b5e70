"""What the entry scripts for pictures assemble alike: data set, splits, loaders."""

from dataclasses import dataclass

import numpy as np
import torch

from utils.augment.crop_flip import CropFlip
from utils.data.images import ImageData, Split, load_image_data, stratified_split, stratified_subset
from utils.data.loader import ImageLoader
from utils.errors import UserError
from utils.reporting.console import Console
from utils.settings import ImageSettings


@dataclass(frozen=True)
class ImageTask:
    """A data set with its splits made, and a loader for each of them."""

    data: ImageData
    train: ImageLoader
    test: ImageLoader
    val: ImageLoader | None

    @property
    def image_size(self) -> int:
        """The longer side in pixels."""
        return max(self.data.train.images.shape[1:3])

    @property
    def sizes(self) -> dict:
        """For the summary."""
        sizes = {
            "classes": len(self.data.classes),
            "skipped_files": self.data.skipped,
            "synthetic": self.data.synthetic,
        }
        if self.val is not None:
            sizes["val_samples"] = self.val.samples
        return sizes


def load_image_task(settings: ImageSettings, device: torch.device, console: Console) -> ImageTask:
    """Loads the data set that the settings name, and cuts it as they say."""
    data = load_image_data(
        settings.dataset,
        data_dir=settings.data_dir,
        cache_dir=settings.cache_dir,
        image_size=settings.image_size,
        on_bad=settings.on_bad,
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        workers=settings.workers,
    )
    chosen, val = np.arange(len(data.train)), data.val
    if settings.val_fraction and val is not None:
        raise UserError(
            f"--val_fraction: the val/ folder in {settings.data_dir} is the validation split; "
            "leave the flag out"
        )
    if settings.val_fraction:
        chosen, held_out = stratified_split(
            data.train.labels, settings.val_fraction, settings.seed, data.classes
        )
        val = _part(data.train, held_out)
    if settings.subset is not None:
        amount = settings.subset if settings.subset <= 1 else int(settings.subset)
        chosen = chosen[stratified_subset(data.train.labels[chosen], amount, settings.seed)]
    whole = len(chosen) == len(data.train)
    train = data.train if whole else _part(data.train, chosen)
    note = ", synthetic" if data.synthetic else ""
    note += f", {data.skipped} bad files left out" if data.skipped else ""
    console.say(
        f"{data.name}{note}: {len(train):,} training, {len(val) if val else 0:,} validation, "
        f"{len(data.test):,} test pictures of {len(data.classes)} classes from {data.source}"
    )
    height, width = data.train.images.shape[1:3]
    augment = CropFlip(
        height,
        width,
        padding=settings.crop_padding,
        mode=settings.padding_mode,
        flip=settings.hflip,
        cutout=settings.cutout,
    )

    def loader(split: Split, **training) -> ImageLoader:
        return ImageLoader(
            split.images,
            split.labels,
            mean=data.mean,
            std=data.std,
            batch_size=settings.batch_size,
            device=device,
            channels_last=settings.channels_last,
            **training,
        )

    return ImageTask(
        data,
        train=loader(
            train,
            accumulation=settings.accumulation_steps,
            augment=augment,
            shuffle=True,
            seed=settings.seed,
        ),
        test=loader(data.test),
        val=loader(val) if val else None,
    )


def _part(split: Split, index: np.ndarray) -> Split:
    return Split(split.images[index], split.labels[index])
