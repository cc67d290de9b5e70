"""Progressive resizing (`--image_size_schedule`): smaller pictures in the first epochs.

From fast.ai's entry for DAWNBench (2018); today in Composer (ProgressiveResizing) and in FFCV's
recipes for ImageNet.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..data.batch import Batch


@dataclass(frozen=True)
class ProgressiveResizing:
    size: int  # of the smaller pictures, in pixels
    epochs: int  # the first ones, which train on them

    def __call__(self, batch: Batch, epoch: int) -> Batch:
        if epoch >= self.epochs:
            return batch
        clean = batch.clean and (resized(batch.clean[0], self.size), batch.clean[1])
        return batch._replace(inputs=resized(batch.inputs, self.size), clean=clean)


def resized(pictures, size: int) -> torch.Tensor:
    """(n, channels, height, width) -> (n, channels, size, size) in the same memory order, bilinear
    and antialiased."""
    last = pictures.is_contiguous(memory_format=torch.channels_last)
    small = F.interpolate(pictures, (size, size), mode="bilinear", antialias=True)
    return small.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
