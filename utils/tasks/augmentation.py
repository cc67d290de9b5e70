"""The augmentation of training pictures that the settings ask for."""

from collections.abc import Sequence
from typing import Any

from ..augment.chain import Chain
from ..augment.crop_flip import CropFlip
from ..augment.named_policies import parse_jitter, parse_policy
from ..augment.own import OwnAugmentation
from ..augment.policies import ColourJitter, Operations
from ..augment.random_erasing import RandomErasing
from ..augment.resized_crop import DecodedCrop, ResizedCrop
from ..data.images.image_data import PictureSplit
from ..settings import ImageSettings


def augmentation(settings: ImageSettings, mean: Sequence[float], train: PictureSplit) -> dict:
    """The arguments of the loader of `train` on augmentation, which is in the order of timm and
    torchvision: crop, flip, operations on colours and shape, the user's own, parts that are
    hidden."""
    height, width, _ = train.shape
    resized, operations = settings.crop == "resized", list[Any]()
    if drawn := _operations(settings, mean, train):
        operations.append(drawn)
    if settings.augment is not None and settings.action.trains:
        operations.append(OwnAugmentation(settings.augment, train.shape))
    later, hiding, cutout = list[Any](), list[Any](), settings.cutout
    first: Any = None
    if resized and not train.encoded:
        later.append(DecodedCrop(settings.crop_area, settings.hflip))
    elif resized:
        first = ResizedCrop(settings.crop_area, settings.hflip)
    else:
        padding, hole = settings.crop_padding, 0 if operations else cutout
        first = CropFlip(height, width, padding, settings.padding_mode, settings.hflip, hole)
    later += operations
    if cutout and (resized or operations):
        hiding.append(CropFlip(height, width, padding=0, flip=0, cutout=cutout))
    if settings.random_erasing:
        colour = [round(255 * value) for value in mean]
        hiding.append(RandomErasing(height, width, settings.random_erasing, colour))
    flips = {"alternate_flips": True} if settings.alternate_flips else {}
    if later:
        return {"augment": first, "later": Chain(*later, *hiding)} | flips
    return {"augment": Chain(first, *hiding) if hiding else first} | flips


def _operations(
    settings: ImageSettings, mean: Sequence[float], train: PictureSplit
) -> Operations | None:
    """Of --auto_augment and --color_jitter."""
    policy = parse_policy(settings.auto_augment)
    drawing, fill = list[Any](), None
    if policy is not None:
        drawing.append(policy.make(*train.shape[:2]))
        fill = [255 * value for value in mean] if policy.mean_fill else None
    if policy is None or policy.jitters:
        strengths = parse_jitter(settings.color_jitter or (policy.jitter if policy else "0"))
        if any(strengths):
            drawing.append(ColourJitter(strengths))
    return Operations(drawing, fill) if drawing else None
