"""A second kind of PictureSplit: pictures are decoded on demand."""

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from utils.augment.chain import part_of
from utils.data.batch import AUGMENT_STREAM, random_generator
from utils.data.images.loader import Normalize
from utils.data.loader import Loader


@dataclass(frozen=True, eq=False)
class RecordSplit:
    records: list[bytes]
    labels: np.ndarray
    shape: tuple[int, int, int]
    on_disk: bool = False
    encoded: bool = False  # has no need of worker processes
    rows: None = None

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> None:
        return None

    def part(self, index):
        return RecordSplit([self.records[i] for i in index], self.labels[index], self.shape)

    def loader(self, *, pool=None, **options):
        return RecordLoader(self, **options)

    def decode(self, i: int) -> torch.Tensor:
        pixels = np.frombuffer(bytearray(zlib.decompress(self.records[i])), np.uint8)
        return torch.from_numpy(pixels.reshape(self.shape))


def records_of(split) -> RecordSplit:
    """The pictures of a DecodedSplit."""
    records = [zlib.compress(chunk[0].tobytes()) for chunk in split.chunks(1)]
    return RecordSplit(records, split.labels, split.shape)


class RecordLoader(Loader):
    def __init__(
        self, split, *, mean, std, batch_size, device, channels_last=True, augment=None,
        shuffle=False, seed=0, mixing=None, accumulation=1, step_size=None,
        rank=0, ranks=1, least=2, drop_last=False, hold_out=None, by_class=False,
    ):  # fmt: skip
        super().__init__(
            split.labels, batch_size=batch_size, device=device, shuffle=shuffle, seed=seed,
            step_size=step_size or batch_size * accumulation * ranks, mixing=mixing, rank=rank,
            ranks=ranks, least=least, drop_last=drop_last, hold_out=hold_out, by_class=by_class,
        )  # fmt: skip
        self.split, self.augment = split, augment
        self.normalize = Normalize(mean, std, split.shape[1], device, channels_last)

    def _inputs(self, epoch, order, pieces):
        plan = None
        if self.augment is not None:
            plan = self.augment.draw(len(order), random_generator(self.seed, AUGMENT_STREAM, epoch))

        def inputs_at(place):
            pictures = torch.stack([self.split.decode(i) for i in order[place]])
            if plan is not None:
                rows = np.arange(len(pictures))
                pictures = self.augment.apply(pictures, part_of(plan, place), rows)
            return self.normalize(pictures)

        return (inputs_at(piece.place) for piece in pieces), inputs_at
