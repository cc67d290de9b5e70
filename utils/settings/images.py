"""Flags of pictures."""

import os
from dataclasses import dataclass

from utils.data.images.sources import IMAGE_DATASETS
from utils.errors import UserError
from utils.setting import setting
from utils.settings.config import Config
from utils.settings.engine import GROUP as ENGINE
from utils.settings.run import USE

GROUP = "images"
# Data sets of the user's own pictures.
OWN_PICTURES = ("imagefolder", "tar", "tfrecord")


@dataclass
class PictureSettings(Config):
    dataset: str = setting(
        "cifar10",
        "Data set; imagefolder is a tree of your own with a folder for each class, tar and "
        "tfrecord are shards of your own, shapes is synthetic and needs no files, the others are "
        "downloaded once",
        group=GROUP,
        choices=IMAGE_DATASETS,
    )
    image_size: int | None = setting(
        None,
        "Side of your own pictures, which are resized and centre-cropped",
        group=GROUP,
        low=8,
        unit="pixels",
        default_text="that of the files if they are alike and small, else 224",
        essential=True,
    )
    test_fraction: float | None = setting(
        None,
        "Fraction of your own pictures without test/ and val/ that becomes the test set; the "
        "same pictures for any --seed",
        group=GROUP,
        above=0,
        below=1,
        essential=True,
    )
    val_is_validation: bool = setting(
        False,
        "val/ of an imagefolder without test/ is the validation split, instead of the test set; "
        "nothing is measured on a test set",
        group=GROUP,
    )
    on_bad: str = setting(
        "error",
        "What to do with a picture that cannot be read: stop with an error, or skip it and count "
        "it",
        group=GROUP,
        choices=("error", "skip"),
        resume="evaluation",
    )
    decode: str = setting(
        "auto",
        "Decode an imagefolder once, into --cache_dir, or always, while training; auto: once if "
        "the decoded pictures take up to 32 GB",
        group=GROUP,
        choices=("auto", "once", "always"),
        before="once",
    )
    loader: str = setting(
        "workers",
        "What decodes JPEGs while training: worker processes alone, or with NVIDIA DALI, an extra "
        "package (requirements-dali.txt), which decodes on the GPU if there is one",
        group=GROUP,
        choices=("workers", "dali"),
        resume="evaluation",
    )
    crop: str = setting(
        "padded",
        "Random crops of training pictures: of the padded picture, or windows of random area and "
        "ratio that are resized, as is usual for large pictures; these need --decode always",
        group=GROUP,
        choices=("padded", "resized"),
    )
    crop_area: float = setting(
        0.08,
        "Smallest area of a resized crop, as a fraction of the picture",
        group=GROUP,
        above=0,
        high=1,
    )
    crop_ratio: float = setting(
        1.0,
        "Side of the central square that is evaluated, as a fraction of the shorter side; below 1 "
        "it needs --decode always",
        group=GROUP,
        low=0.1,
        high=1,
    )
    crop_padding: int = setting(
        4,
        "Padded crop: pixels added to every side before it; 0: no crop",
        group=GROUP,
        low=0,
        unit="pixels",
    )
    padding_mode: str = setting(
        "zeros",
        "Content of the padding: black, or the mirrored picture",
        group=GROUP,
        choices=("zeros", "reflect"),
    )
    hflip: float | None = setting(
        None,
        "Probability of mirroring a picture horizontally",
        group=GROUP,
        low=0,
        high=1,
        default_text="0 for mnist, whose digits have no mirror image, else 0.5",
    )
    cutout: int = setting(
        0,
        "Side of a blank square in every training picture; 0: none",
        group=GROUP,
        low=0,
        unit="pixels",
    )
    random_erasing: float = setting(
        0.0,
        "Probability of filling a rectangle of 2 to 33 % of the picture with the mean colour",
        group=GROUP,
        low=0,
        high=1,
    )
    drop_last: bool = setting(
        False,
        "Leave out the last optimizer step of an epoch if it is smaller than the others: other "
        "pictures in every epoch",
        group=GROUP,
    )
    flip_test: bool = setting(
        False,
        "Also measure the test set with probabilities averaged over each picture and its mirror "
        "image; with --predict, predict by these averages",
        group=USE,
        resume="free",
        essential=True,
    )
    channels_last: bool = setting(
        True, "Keep the channels of a pixel together in memory: faster convolutions", group=ENGINE
    )

    @classmethod
    def implied(cls, given, say):
        folder = given.get("data_dir")
        if "dataset" in given or not os.path.isdir(os.path.join(folder or "", "train")):
            return super().implied(given, say)
        say(f"note: --dataset imagefolder, since {folder} has a folder train/")
        return super().implied(given, say) | {"dataset": "imagefolder"}

    def ineffective(self):
        yield from super().ineffective()
        if self.dataset not in OWN_PICTURES:
            reason = f"--dataset {self.dataset} has its own pictures; the flag is for imagefolder"
            names = (
                "image_size",
                "test_fraction",
                "val_is_validation",
                "cache_dir",
                "decode",
                "loader",
            )
            names += () if self.predict else ("on_bad", "workers")
            yield from ((name, reason, "dataset") for name in names)
        elif self.predict:
            yield "loader", "--predict decodes files in threads, by Pillow", "predict"
        if self.dataset == "shapes":
            reason = "--dataset shapes is built in and reads no files"
            yield "data_dir", reason, "dataset"
        elif self.dataset != "imagefolder":
            yield "decode", f"--dataset {self.dataset} is always decoded while training", "dataset"
        if self.crop == "resized":
            for name in ("crop_padding", "padding_mode"):
                yield name, "--crop resized pads nothing", "crop"
        else:
            yield "crop_area", "only --crop resized has areas", "crop"
        if self.val_is_validation and self.eval_every == 0:
            reason = "--eval_every 0 never measures on that split"
            yield "val_is_validation", reason, "eval_every"
        if self.val_is_validation:
            reason = "--val_is_validation leaves no test set"
            yield from ((n, reason, "val_is_validation") for n in ("report", "flip_test"))
            for name in ("test_fraction", "val_fraction"):
                yield name, "--val_is_validation takes val/ for validation", "val_is_validation"
        if self.crop_padding == 0:
            yield "padding_mode", "--crop_padding is 0", "crop_padding"
        if self.action.trains and not self.final_test:
            reason = "--no_final_test measures nothing on the test set"
            yield "flip_test", reason, "final_test"
        for name, does in (("export", "writes the model"), ("dry_run", "stops after a few steps")):
            if getattr(self, name):
                yield "flip_test", f"--{name} {does} and measures nothing", name

    def check(self):
        if self.val_is_validation:
            self.final_test = False
        super().check()
        self._check_decoding()
        if self.hflip is None:
            self.hflip = 0.0 if self.dataset == "mnist" else 0.5

    def _check_decoding(self):
        """Crops of the pictures as they are in their files, and DALI, need these decoded while
        training."""
        if self.crop == "resized":
            flag, why = "--crop resized", "decoding once crops to the centre"
        elif self.crop_ratio < 1:
            flag, why = f"--crop_ratio {self.crop_ratio:g}", "decoding once crops to the centre"
        elif self.loader == "dali":
            flag, why = "--loader dali", "decoding once does without it"
        else:
            return
        if self.dataset not in OWN_PICTURES:  # of --loader it was said
            raise UserError(
                f"{flag} crops pictures that are decoded while training, and --dataset "
                f"{self.dataset} is decoded already: leave it out"
            )
        if self.decode == "once" and self.dataset == "imagefolder":
            raise UserError(f"{flag} needs --decode always: {why}")
        if self.dataset == "imagefolder":
            self.decode = "always"
