"""Flags for training that starts from trained weights."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..errors import UserError
from ..setting import setting
from .config import Config

transfer_flag = partial(setting, group="transfer")
# Values of --pretrained that stand for the weights published for the model.
PUBLISHED = ("imagenet", "published")
# Names that torchvision gives to its weights, as in ResNet50_Weights.IMAGENET1K_V2.
OF_TORCHVISION = re.compile(r"(?:(?P<model>\w+)_Weights\.)?(?P<version>DEFAULT|IMAGENET1K_\w+)")


def is_published(source: str | None) -> bool:
    """Whether this value of --pretrained stands for published weights."""
    return source is not None and (
        source in PUBLISHED or OF_TORCHVISION.fullmatch(source) is not None
    )


@dataclass
class TransferSettings(Config):
    # Settings that affect the backbone alone: without effect where only the head is trained.
    of_backbone: ClassVar[Collection[str]] = ()
    # Settings by which the features of a sample vary, and their values without which they do not.
    unvaried: ClassVar[dict[str, Any]] = {"mixup": "none", "cutmix_alpha": 0, "eval_views": "none"}

    pretrained: str | None = transfer_flag(
        None,
        "Start from these weights: a .safetensors or .pth file, the folder of a run, or imagenet "
        "for torchvision's, also by their names there, as IMAGENET1K_V1; a head for other classes "
        "is replaced",
        bare="imagenet",
    )
    freeze_backbone: bool = transfer_flag(
        False,
        "Train the head alone; everything else stays unchanged, BatchNorm's statistics too. Where "
        "nothing is augmented or mixed, each sample goes through it only once",
    )
    unfreeze_epoch: int | None = transfer_flag(
        None, "Train everything from this epoch on, counted from 0", low=1,
        unit="epoch", essential=True,
    )  # fmt: skip
    layer_decay: float | None = transfer_flag(
        None,
        "Learning rate of each block relative to the next one's: the head has the full rate, the "
        "stem the lowest",
        above=0, below=1,
    )  # fmt: skip
    head_lr: float | None = transfer_flag(
        None, "Peak learning rate of the head, instead of --lr", above=0, default_text="--lr"
    )

    @property
    def trains_head_alone(self) -> bool:
        """For the whole run; all that lies before the head is then in evaluation mode."""
        return self.freeze_backbone and self.unfreeze_epoch is None

    @property
    def flags_of_equal_features(self) -> list[str]:
        """What is lacking for a sample to have the same features in every step."""
        wanted = self.unvaried.items()
        lacking = [(n, v) for n, v in wanted if getattr(self, n, None) not in (None, v)]
        return [f"--no_{n}" if v is False else f"--{n} {v}".lower() for n, v in lacking]

    def ineffective(self):
        yield from super().ineffective()
        if not self.freeze_backbone:
            yield "unfreeze_epoch", "nothing is frozen without --freeze_backbone", "freeze_backbone"
        if self.trains_head_alone:
            names = ("layer_decay", *self.of_backbone)
            yield names, "the head alone is trained", "freeze_backbone"

    def validate(self):
        super().validate()
        if self.freeze_backbone and self.pretrained is None:
            raise UserError(
                "--freeze_backbone would keep random weights: name trained ones by --pretrained"
            )
        if self.unfreeze_epoch is not None and self.unfreeze_epoch >= self.epochs:
            raise UserError(
                f"--unfreeze_epoch {self.unfreeze_epoch} is not reached in --epochs {self.epochs}: "
                "leave it out, or take an earlier one"
            )
