#!/usr/bin/env python3
"""Trains a ResNet on pictures: by default ResNet-50 on CIFAR-10.

python resnet50_test.py
python resnet50_test.py my_pictures --depth 18
python resnet50_test.py --resume
python resnet50_test.py --resume runs/my_run --predict new_pictures
"""

from dataclasses import dataclass

from utils.entry import Entry, end_process
from utils.errors import UserError
from utils.setting import setting
from utils.settings import ImageSettings
from utils.settings.transfer import is_published

MODEL = "model"  # heading in --help


@dataclass
class Settings(ImageSettings):
    """The settings of this entry: those of every run on pictures, and those of a ResNet."""

    entry = "resnet50_test.py"
    of_backbone = ("drop_path",)

    depth: int = setting(
        50,
        "Layers: 18 and 34 have basic blocks, 50 and more bottlenecks; 8 is the network of "
        "cifar10-airbench, without residuals, for a few minutes",
        group=MODEL, choices=(8, 18, 34, 50, 101, 152),
    )  # fmt: skip
    width: int = setting(
        64,
        "Channels of the first stage; later stages have 2, 4 and 8 times as many, with --depth 8 "
        "4 and 4",
        group=MODEL, low=1, unit="channels",
    )  # fmt: skip
    stem: str | None = setting(
        None,
        "First layers: cifar keeps the resolution, imagenet divides it by 4, whiten keeps it and "
        "has nothing to train: its filters follow from the training pictures",
        group=MODEL, choices=("cifar", "imagenet", "whiten"),
        default_text="whiten with --depth 8, else cifar for pictures of up to 64 pixels without "
        "--pretrained imagenet",
    )  # fmt: skip

    zero_init_residual: bool = setting(
        True,
        "Start the last BatchNorm of each block at 0, so that blocks start as identities; from "
        "scratch only, as trained weights replace it",
        group=MODEL,
        before=False,
    )
    drop_path: float = setting(
        0.0,
        "Stochastic depth: probability of skipping the last block, decreasing towards the "
        "first",
        group=MODEL, low=0, below=1,
    )  # fmt: skip

    published_for = "--width 64 and one of --depth 18, 34, 50, 101, 152"

    @property
    def published_weights(self) -> tuple[str, str] | None:  # type: ignore[override]  # only read
        published = self.width == 64 and self.depth > 8
        return ("torchvision", f"resnet{self.depth}") if published else None

    def validate(self):
        super().validate()
        if self.depth == 8 and self.stem not in (None, "whiten"):
            raise UserError(f"--stem {self.stem}: --depth 8 has a whitened one; leave it out")

    def ineffective(self):
        yield from super().ineffective()
        if self.depth == 8:
            names = ("zero_init_residual", "drop_path")
            yield names, "the network of --depth 8 has no residuals", "depth"


def build_model(settings: Settings, card):
    """The ResNet for the pictures and classes of `card` (a ModelCard), on the CPU."""
    from utils.models.airbench import LEAST, AirbenchNet
    from utils.models.resnet import ResNet

    size = max(card.height, card.width)
    # Published ImageNet weights belong to the imagenet stem, whatever the pictures' size.
    imagenet = size > 64 or is_published(settings.pretrained)
    stem = settings.stem or ("imagenet" if imagenet else "cifar")
    lone = [name for name in ("batch_size", "global_batch") if getattr(settings, name) == 1]
    trains = settings.action.trains and not settings.trains_head_alone
    if lone and trains and size <= (8 if stem == "cifar" else 32):
        raise UserError(
            f"--{lone[0]} 1: pictures of {size} pixels end as a single one, and BatchNorm needs "
            "two or more; take a larger batch"
        )
    if settings.depth == 8:
        if min(card.height, card.width) < LEAST:
            raise UserError(f"--depth 8 takes pictures of {LEAST} pixels or more: --image_size 32")
        return AirbenchNet(len(card.classes), settings.width, card.channels)
    return ResNet(
        settings.depth,
        len(card.classes),
        settings.width,
        stem,
        channels=card.channels,
        zero_init_residual=settings.zero_init_residual,
        drop_path=settings.drop_path,
    )


def model_name(settings: Settings) -> str:
    width = f"w{settings.width}" if settings.width != 64 else ""
    return f"{'airbench' if settings.depth == 8 else 'resnet'}{settings.depth}{width}"


ENTRY = Entry(Settings, build_model, model_name, __doc__)
main = ENTRY.main

if __name__ == "__main__":
    end_process(main())
