"""Batches of uint8 pictures: kept on a GPU if they fit, else in memory or in a memory map, or
decoded while training."""

import functools
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...augment.chain import Augmentation, part_of, with_flips
from ...to_device import to_device
from ..batch import AUGMENT_STREAM, FLIP_STREAM, Batch, random_generator
from ..loader import Loader
from ..steps import Piece
from ..workers import WorkerPool
from .records import EncodedPictures, RecordReader

# Largest part of a GPU's free memory that a data set may take.
GPU_FRACTION = 0.25


class Packed(NamedTuple):
    """Inputs that `ImageLoader.made` has yet to make."""

    choices: Tensor  # (rows, n) int64, on the device: which pictures, and how each is augmented


class Normalize:
    """uint8 (n, height, width, channels) -> float32 (n, channels, height, width).

    y = (x / 255 - mean) / std, computed as x * scale + shift on rows of pixels. The result is in
    channels_last order like `images`, or copied to contiguous order.
    """

    def __init__(self, mean, std, width: int, device: torch.device, channels_last: bool = True):
        self.channels_last = channels_last
        std = torch.tensor(std, dtype=torch.float64)
        std = torch.where(std > 0, std, 1.0)  # a constant channel becomes 0
        mean = torch.tensor(mean, dtype=torch.float64)
        self.scale = (1 / (255 * std)).float().repeat(width).to(device)  # (width * channels,)
        self.shift = (-mean / std).float().repeat(width).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        n, height, width, channels = images.shape
        rows = images.reshape(n * height, width * channels).float()
        torch.addcmul(self.shift, rows, self.scale, out=rows)
        pixels = rows.view(n, height, width, channels).permute(0, 3, 1, 2)
        return pixels if self.channels_last else pixels.contiguous()


class PictureLoader(Loader):
    """Batches of pictures; base of those below.

    Args:
        labels: (samples,) int64.
        width: of the pictures, in pixels.
        mean, std: per channel, of pixels scaled to 0..1.
        batch_size: samples in a micro-batch.
        device: where the batches are needed.
        ranks: how many processes share every step.
        accumulation: micro-batches of each rank in a step.
        step_size: samples of all ranks in a step; overrides `accumulation`.
        augment: crop, flip and so on, drawn with the loader's seed; None for evaluation.
        later: what is done after it, on the device; None: nothing.
        alternate_flips: which of the samples are mirrored in the first epoch is drawn once, and
            from then on each of them is mirrored in every other epoch: Jordan, "94% on CIFAR-10 in
            3.29 Seconds on a Single GPU" (2024), arXiv 2404.00498, section 3.6. `augment`, or
            `later` without one, begins with what mirrors.
        channels_last: memory order of the batches.
        rows: (samples,) int64, indices of the samples into the pictures; None: all, in order.
        pool: processes that read ahead; None: this process reads.
        options: `shuffle`, `seed`, `repeats`, `mixing`, `rank`, `least`, `drop_last`, `hold_out`,
            `by_class`: see Loader and Steps.
    """

    _reader: Any  # a Reader, for `pool`

    def __init__(
        self,
        labels: np.ndarray,
        *,
        width: int,
        mean,
        std,
        batch_size: int,
        device: torch.device,
        ranks: int = 1,
        accumulation: int = 1,
        step_size: int | None = None,
        augment: Augmentation | None = None,
        later: Augmentation | None = None,
        alternate_flips: bool = False,
        channels_last: bool = True,
        rows: np.ndarray | None = None,
        pool: WorkerPool | None = None,
        **options,
    ):
        super().__init__(
            labels,
            batch_size=batch_size,
            step_size=step_size or batch_size * accumulation * ranks,
            device=device,
            ranks=ranks,
            **options,
        )
        self.augment, self.later = augment, later
        self.first_flips: np.ndarray | None = None  # (samples,) int64, 1: mirrored
        if alternate_flips:
            generator = random_generator(self.seed, FLIP_STREAM)
            self.first_flips = generator.integers(2, size=len(labels))
        self.normalize = Normalize(mean, std, width, device, channels_last)
        self.rows = rows
        self._pool = pool

    @property
    def workers(self) -> int:  # type: ignore[override]  # only read
        return self._pool.workers if self._pool is not None else 0

    def _inputs(self, epoch: int, order: np.ndarray, pieces: list[Piece]):
        plan = later_plan = None
        generator = random_generator(self.seed, AUGMENT_STREAM, epoch)
        if self.augment is not None:
            plan = self.augment.draw(len(order), generator)
        if self.later is not None:
            later_plan = self.later.draw(len(order), generator)
        if self.first_flips is not None:
            flips = (self.first_flips[order] + epoch) % 2
            if self.augment is not None:
                plan = with_flips(plan, flips)
            else:
                later_plan = with_flips(later_plan, flips)
        rows = order if self.rows is None else self.rows[order]

        def part(place) -> tuple:
            return rows[place], part_of(plan, place)

        def inputs_at(places: np.ndarray | slice) -> Tensor:
            return self._finish(self._gather(*part(places)), part_of(later_plan, places))

        parts = (part(piece.place) for piece in pieces)
        if self._suits_graphs and self._can_defer:
            pack = self._packed  # type: ignore[attr-defined]  # ImageLoader alone can defer
            return (Packed(pack(*each)) for each in parts), inputs_at
        if self._pool is None:
            return (inputs_at(piece.place) for piece in pieces), inputs_at
        later_parts = (part_of(later_plan, piece.place) for piece in pieces)

        def finish(images: np.ndarray) -> Tensor:
            return self._finish(images, next(later_parts))

        return self._pool.batches(self._reader, parts, finish, self.turns), inputs_at

    @property
    def _can_defer(self) -> bool:
        """Whether the device alone can make inputs, by `made`."""
        return False

    @abstractmethod
    def _gather(self, rows: np.ndarray, plan) -> Tensor | np.ndarray:
        """(n, height, width, channels) uint8."""

    def _finish(self, images: Tensor | np.ndarray, later_plan=None) -> Tensor:
        """Normalised inputs. A new tensor, since workers reuse their arrays."""
        images = to_device(images, self.device)
        if later_plan is not None:
            images = self.later.apply(images, later_plan)
        return self.normalize(images)


class ImageLoader(PictureLoader):
    """Batches of decoded pictures.

    For a GPU the pictures are kept in its memory if they take at most a quarter of what is free
    there, else in host memory. With a `pool`, its processes gather and augment the pictures of
    host memory ahead of time.

    Args:
        images: (pictures, height, width, channels) uint8, in memory or, with a pool, mapped.
        options: see PictureLoader.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, device: torch.device, **options):
        super().__init__(labels, width=images.shape[2], device=device, **options)
        with warnings.catch_warnings():  # of a read-only memory map; never written
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.images = torch.from_numpy(images)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if len(labels) * images[0].nbytes <= GPU_FRACTION * free:
                self.images, self.labels = upload(images, self.rows, device), self.labels.to(device)
                self.rows = self._pool = None
        pool = self._pool
        self._reader = pool.reader(images, self.augment) if pool is not None else None

    @property
    def _can_defer(self) -> bool:
        # How `later` groups the samples of a batch differs from batch to batch.
        in_place = self.images.device.type == self.device.type and self._pool is None
        return in_place and self.later is None

    def made(self, batch: Batch) -> Batch:
        if not isinstance(batch.inputs, Packed):
            return batch
        choices = batch.inputs.choices
        if self.augment is None:
            pictures = self.images.index_select(0, choices[0])
        else:
            pictures = self.augment.apply_packed(self.images, choices)
        return batch._replace(inputs=self._finish(pictures))

    def _packed(self, rows: np.ndarray, plan) -> Tensor:
        packed = rows[None] if plan is None else self.augment.pack(plan, rows)
        return to_device(packed, self.device)

    def _gather(self, rows: np.ndarray, plan) -> Tensor:
        """(n, height, width, channels) uint8, on the device of `self.images`."""
        if plan is not None:
            return self.augment.apply(self.images, plan, rows)
        return self.images.index_select(0, to_device(rows, self.images.device))


class EncodedLoader(PictureLoader):
    """Batches of pictures that are decoded while training.

    Args:
        pictures: are decoded by the processes of `pool`, or by this one.
        reader: how they are decoded; makes a reader of (pictures, augmentation).
        options: see PictureLoader.
    """

    def __init__(
        self,
        pictures: EncodedPictures,
        labels: np.ndarray,
        *,
        reader: Callable[..., RecordReader] = RecordReader,
        **options,
    ):
        super().__init__(labels, width=pictures.size, **options)
        self._reader = reader(pictures, self.augment)

    def _gather(self, rows: np.ndarray, plan) -> Tensor | np.ndarray:
        return self._reader.pictures_of(self._opened, rows, plan)

    @functools.cached_property
    def _opened(self):
        return self._reader.open()


def upload(images: np.ndarray, rows: np.ndarray | None, device: torch.device) -> Tensor:
    """The pictures `rows` on the device, copied a few MiB at a time to need little host memory."""
    n = len(images) if rows is None else len(rows)
    resident = torch.empty(n, *images.shape[1:], dtype=torch.uint8, device=device)
    size = max(1, (1 << 24) // images[0].nbytes)
    for start in range(0, n, size):
        piece = slice(start, start + size)
        chunk = np.array(images[piece if rows is None else rows[piece]])
        resident[piece].copy_(torch.from_numpy(chunk))
    return resident
