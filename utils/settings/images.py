"""Flags of pictures."""

import os
import re
from dataclasses import dataclass

from ..data.images.image_data import Form
from ..data.images.sources import IMAGE_DATASETS, TEST_FRACTION
from ..data.images.split_names import ENDINGS, class_folder
from ..errors import UserError
from .config import Config, refuse_beside
from .data import data_flag
from .distributed import process_flag
from .engine import machine_flag
from .mixing import overfitting_flag
from .run import use_flag
from .transfer import TransferSettings

# Data sets of the user's own pictures: those that can be decoded once, and all.
FILES = ("imagefolder", "csv")
OWN_PICTURES = (*FILES, "tar", "tfrecord", "parquet")


@dataclass
class PictureSettings(Config):
    unvaried = TransferSettings.unvaried | {
        **{"crop": "padded", "crop_padding": 0, "hflip": 0, "cutout": 0, "random_erasing": 0},
        **{"auto_augment": "none", "color_jitter": "0", "alternate_flips": False},
        **{"image_size_schedule": "none", "augment": None},
    }

    dataset: str = data_flag(
        "cifar10",
        "Data set; imagefolder is a tree of your own with a folder for each class, csv are lists "
        "of your own files and their classes, tar, tfrecord and parquet are shards of your own "
        "(large files of many pictures), shapes is synthetic and needs no files, the others are "
        "downloaded once",
        choices=IMAGE_DATASETS,
    )
    image_column: str | None = data_flag(
        None, "Column of your lists with the files, by name or number from 1; also with --predict",
        default_text="found, or asked for", resume="free", essential=True,
    )  # fmt: skip
    label_column: str | None = data_flag(
        None, "Column of your lists with the class, by name or number from 1",
        default_text="found, or asked for", resume="free", essential=True,
    )  # fmt: skip
    image_dir: str | None = data_flag(
        None, "Folder of the pictures in your lists, relative to the lists'; also with --predict",
        default_text="found, or asked for", resume="free", essential=True,
    )  # fmt: skip
    group_by: str | None = data_flag(
        None,
        "Which of your pictures belong together, as those of a patient, so that --val_fraction and "
        "--test_fraction keep them in one split. folder: those in a folder (below the class's); "
        "or a regular expression: those in whose paths, within --data_dir, its (group) matches the "
        r"same, as in '(patient\d+)_'",
        essential=True,
    )
    image_size: int | None = data_flag(
        None,
        "Side of the pictures, which are resized, your own as --resize_mode says",
        low=8,
        unit="pixels",
        default_text="that of the data set; of your own files if they are alike and small, else "
        "224",
    )
    image_size_schedule: str | None = data_flag(
        None,
        "SIZE:FRACTION, as 24:0.5: train on pictures of SIZE pixels in the first FRACTION of the "
        "epochs, then on those of full size, for a network that takes any size; they are resized "
        "on the device, after the augmentation",
    )
    resize_mode: str = data_flag(
        "crop",
        "How your own pictures become squares. crop: the centre; squash: all of the picture, its "
        "sides resized independently; letterbox: all of it, between gray bars",
        choices=("crop", "squash", "letterbox"),
    )
    transparency: str = data_flag(
        "white",
        "What transparent pictures of your own are laid on; dropped: their colours are taken as "
        "they are stored, whether they are to be seen or not",
        choices=("white", "black", "dropped"),
        before="dropped",
    )
    white_level: int = data_flag(
        65535,
        "The value of 16-bit pictures that becomes white: 4095 for cameras of 12 bits",
        low=255,
        high=65535,
    )
    test_fraction: float | None = data_flag(
        None,
        "Fraction of your own pictures without test/ and val/ that becomes the test set; the "
        "same pictures for any --seed",
        default_text=f"{TEST_FRACTION:g}",
        above=0,
        below=1,
        essential=True,
    )
    val_is_validation: bool = data_flag(
        False,
        "val/ of your own pictures without test/ is the validation split, instead of the test set; "
        "nothing is measured on a test set",
        essential=True,
    )
    on_bad: str = data_flag(
        "error",
        "What to do with a picture that cannot be decoded: stop with an error, or skip it and "
        "count it",
        choices=("error", "skip"),
        resume="evaluation",
    )
    decode: str = data_flag(
        "auto",
        "Decode an imagefolder or csv once, into --cache_dir, or always, while training; auto: "
        "once if the decoded pictures take up to 32 GB, but always with --crop resized, --loader "
        "dali, --crop_ratio below 1, --val_resize, or another --eval_size than --image_size",
        choices=("auto", "once", "always"),
        before="once",
    )
    eval_size: int | None = data_flag(
        None,
        "Side of the pictures at evaluation, prediction and export, for a network that takes any "
        "size; for your own pictures, which are then decoded while training (--decode always)",
        low=8,
        unit="pixels",
        default_text="that of training, --image_size",
    )
    loader: str = data_flag(
        "workers",
        "What decodes JPEGs while training: workers, processes with Pillow or simplejpeg; or dali, "
        "NVIDIA DALI, an extra package (requirements-dali.txt), on an NVIDIA GPU",
        choices=("workers", "dali"),
        resume="evaluation",
    )
    crop: str = overfitting_flag(
        "padded",
        "Random crops of training pictures. padded: the picture is padded, then cropped to its "
        "size; resized: a crop of random area and aspect ratio is resized, as is usual for large "
        "pictures",
        choices=("padded", "resized"),
    )
    crop_area: float = overfitting_flag(
        0.08, "Smallest area of a resized crop, as a fraction of the picture", above=0, high=1
    )
    crop_ratio: float = data_flag(
        1.0,
        "Side of the central square that is evaluated, as a fraction of the shorter side; below 1 "
        "for your own pictures alone, which are then decoded while training (--decode always)",
        low=0.1,
        high=1,
    )
    val_resize: int | None = data_flag(
        None,
        "Another way to give --crop_ratio: at evaluation the shorter side is resized to this, then "
        "a square of --eval_size pixels (without that flag, of --image_size) is cropped from the "
        "centre; for torchvision's recipes, which crop 224 by default, add --eval_size 224",
        low=8,
        unit="pixels",
    )
    crop_padding: int = overfitting_flag(
        4, "Pixels added on every side before a padded crop; 0: no crop", low=0, unit="pixels"
    )
    padding_mode: str = overfitting_flag(
        "reflect",
        "Content of the padding: the mirrored picture, or black (zeros)",
        choices=("zeros", "reflect"),
    )
    hflip: float | None = overfitting_flag(
        None,
        "Probability of mirroring a picture horizontally",
        low=0,
        high=1,
        default_text="0 for mnist, whose digits have no mirror image, else 0.5",
    )
    alternate_flips: bool = overfitting_flag(
        False,
        "Mirror each picture in every other epoch, instead of at random: two epochs show both of "
        "its sides",
    )
    cutout: int = overfitting_flag(
        0,
        "Side of a black square in every training picture; 0: none (in the paper it has the mean "
        "colour, as with --random_erasing here)",
        low=0,
        unit="pixels",
    )
    auto_augment: str = overfitting_flag(
        "none",
        "Random operations on colours and shape, by the names of timm and torchvision: "
        "imagenet and original (AutoAugment), rand-m9-mstd0.5-inc1 (RandAugment), ra, ta_wide "
        "(TrivialAugment), 3a (3-Augment) or none",
    )
    color_jitter: str | None = overfitting_flag(
        None,
        "Random changes of brightness, contrast and saturation by up to this factor; or a number "
        "for each, and a fourth for hue",
        many=True,
        default_text="0.3 with --auto_augment 3a, else 0",
    )
    augment: str | None = overfitting_flag(
        None,
        "Augmentation of your own, FILE.py:NAME, after those above: a function of a batch of "
        "pictures and a generator, or a transform of torchvision",
        default_text="none",
    )
    ra_reps: int = overfitting_flag(
        1,
        "Repeated augmentation: times that a picture appears in an epoch, each time augmented "
        "differently; an epoch keeps its number of samples, so it has fewer pictures",
        low=1,
    )
    random_erasing: float = overfitting_flag(
        0.0,
        "Probability of filling a rectangle of 2 to 33 % of the picture with the mean colour",
        low=0,
        high=1,
    )
    drop_last: bool = process_flag(
        False,
        "Skip the last optimizer step of an epoch if it is smaller than the others; other pictures "
        "are skipped in every epoch",
    )
    eval_views: str = use_flag(
        "none",
        "Also measure the test set with probabilities averaged over views of each picture; with "
        "--predict, predict by these averages. mirror: it and its mirror image; shift: it, and it "
        "moved by a pixel to the upper left and to the lower right, which weigh half as much each; "
        "both: all of these, and their mirror images",
        choices=("none", "mirror", "shift", "both"),
        bare="mirror",
        resume="free",
        essential=True,
    )
    channels_last: bool = machine_flag(
        True, "Keep the channels of a pixel together in memory: faster convolutions"
    )

    @classmethod
    def implied(cls, given, say):
        found, implied = given.get("data_dir") or "", super().implied(given, say)
        if given.get("steps_per_epoch"):
            implied |= {"drop_last": True}
        if not found or "dataset" in given:
            return implied
        inner = class_folder(os.path.join(found, "train"))
        lists = [os.path.isfile(os.path.join(found, f"train{ending}")) for ending in ENDINGS]
        dataset, why = "imagefolder", f"{found} has a folder train/"
        if found.lower().endswith(ENDINGS):
            dataset, why = "csv", f"{found} is a list"
        elif any(lists) and (inner is None or os.path.basename(inner) == "train"):
            dataset, why = "csv", f"{found} has a list of training pictures"
        elif not os.path.isdir(os.path.join(found, "train")):
            if (inner := class_folder(found)) is None:
                return implied
            why = f"there are pictures in {inner}"
        say(f"note: --dataset {dataset}, since {why}")
        return implied | {"dataset": dataset}

    def ineffective(self):
        yield from super().ineffective()
        of_other_files = self.predict or self.eval_data
        if self.dataset not in OWN_PICTURES:
            reason = f"it is for your own pictures, and those of --dataset {self.dataset} are not"
            names: tuple[str, ...] = ("test_fraction", "val_is_validation", "decode", "loader")
            of_files = ("on_bad", "resize_mode", "transparency", "white_level")
            yield names + (() if of_other_files else of_files), reason, "dataset"
            if self.image_size is None and not self.eval_data:
                reason = f"--dataset {self.dataset} is in memory, unless --image_size resizes it"
                keeps = self.action.trains and (self.baseline or self.trains_head_alone)
                yield () if keeps else "cache_dir", reason, "dataset"
                yield () if self.predict else "workers", reason, "dataset"
        elif self.predict:
            yield "loader", "--predict decodes files in threads, by Pillow", "predict"
        reads_list, idle = self.dataset == "csv", "dataset"
        if self.predict:
            reads_list, idle = self.predict.lower().endswith(ENDINGS), "predict"
            yield "label_column", "--predict needs no classes", "predict"
        elif self.eval_data:
            reads_list, idle = not os.path.isdir(self.eval_data), "eval_data"
        if not reads_list:
            names = ("label_column", "image_column", "image_dir", "group_column", "encoding")
            yield names[: -1 if self.labels else None], "it is for lists of pictures (csv)", idle
        if self.resize_mode != "crop":
            reason = f"--resize_mode {self.resize_mode} keeps the whole picture"
            yield ("crop_ratio", "val_resize"), reason, "resize_mode"
        if self.dataset == "shapes":
            yield "data_dir", "--dataset shapes is built in and reads no files", "dataset"
        elif self.dataset not in FILES:
            yield "decode", f"--dataset {self.dataset} is always decoded while training", "dataset"
        if self.dataset not in FILES:
            yield "group_by", "it is for your own pictures, each in a file", "dataset"
        if self.crop == "resized":
            yield ("crop_padding", "padding_mode"), "--crop resized pads nothing", "crop"
        else:
            yield "crop_area", "only --crop resized has areas", "crop"
        if self.val_is_validation:
            if self.eval_every == 0:
                reason = "--eval_every 0 never measures on that split"
                yield "val_is_validation", reason, "eval_every"
            if not self.eval_data:
                reason = "--val_is_validation leaves no test set"
                yield "eval_views", reason, "val_is_validation"
            reason = "--val_is_validation takes val/ for validation"
            yield ("test_fraction", "val_fraction"), reason, "val_is_validation"
        if (policy := self._auto_augment()) is not None and not policy.jitters:
            reason = f"--auto_augment {self.auto_augment} takes its place, as with timm"
            yield "color_jitter", reason, "auto_augment"
        if self.crop_padding == 0:
            yield "padding_mode", "--crop_padding is 0", "crop_padding"
        if self.action.trains and not self.final_test:
            reason = "--no_final_test measures nothing on the test set"
            yield "eval_views", reason, "final_test"
        for name, does in (("export", "writes the model"), ("dry_run", "stops after a few steps")):
            if getattr(self, name):
                yield "eval_views", f"--{name} {does} and measures nothing", name

    def validate(self):
        if self.val_is_validation:
            self.final_test = False
        super().validate()
        self._check_sizes()
        self._check_decoding()
        self._check_size_schedule()
        self._auto_augment()  # raises UserError if there is no such policy
        if self.group_by is not None and self.group_column is not None:
            raise UserError("--group_by and --group_column both tell groups: leave one of them out")
        try:
            re.compile(self.group_by or "")
        except re.error as error:
            what = f"--group_by {self.group_by}: not a regular expression"
            raise UserError(f"{what} ({error}): correct it") from None
        if self.color_jitter is not None:
            from ..augment.named_policies import parse_jitter

            parse_jitter(self.color_jitter)
        if self.hflip is None:
            self.hflip = 0.0 if self.dataset == "mnist" else 0.5
        if self.alternate_flips and self.hflip != 0.5:
            raise UserError(
                f"--alternate_flips mirrors half of the pictures in every epoch, and --hflip is "
                f"{self.hflip:g}: leave --alternate_flips out, or take --hflip 0.5"
            )

    def _auto_augment(self):
        """The Policy of --auto_augment; None: there is none."""
        from ..augment.named_policies import parse_policy  # with NumPy: --help goes without

        return parse_policy(self.auto_augment)

    def _check_sizes(self):
        if self.eval_size is not None and self.image_size is None:
            raise UserError("--eval_size needs --image_size, the size in training")
        if self.val_resize is None or self.resize_mode != "crop":
            return
        size = self.eval_size or self.image_size
        if size is None:
            raise UserError(
                "--val_resize needs --image_size, the size of the crop unless --eval_size sets it"
            )
        if not size <= self.val_resize <= 10 * size:
            raise UserError(
                f"--val_resize {self.val_resize}: {size} pixels are cropped from it, so it must be "
                f"{size} to {10 * size}"
            )
        if self.crop_ratio != 1:
            raise UserError(
                f"--val_resize {self.val_resize} and --crop_ratio {self.crop_ratio:g} both set the "
                "crop at evaluation: leave one out"
            )

    def _check_size_schedule(self):
        if self.image_size_schedule is None:
            return
        size_schedule(self.image_size_schedule)
        others = (
            ("--time_budget", self.time_budget, "it plans by steps that take equally long"),
            ("--engine ort", self.engine == "ort", "it takes pictures of one size"),
            ("--cuda_graphs on", self.cuda_graphs == "on", "a graph takes pictures of one size"),
            ("--cutmix_alpha", self.cutmix_alpha, "its boxes are for pictures of full size"),
        )
        if self.action.trains:
            refuse_beside("--image_size_schedule", others)

    @property
    def evaluated_part(self) -> float:
        """Side of the central square that is evaluated, as a fraction of the shorter side."""
        if self.resize_mode != "crop":
            return 1.0
        if self.val_resize is None:
            return self.crop_ratio
        size = self.eval_size or self.image_size
        assert size is not None, "`validate` asks for one of them"
        return size / self.val_resize

    @property
    def reads_in_workers(self) -> bool:
        return self.dataset in OWN_PICTURES

    @property
    def form(self) -> Form:
        """How a file becomes a picture."""
        part, white = self.evaluated_part, self.white_level
        return Form(self.resize_mode, part, self.transparency, white)

    def _check_decoding(self):
        """What needs the pictures as they are in their files: these are decoded while training."""
        if self.dataset not in OWN_PICTURES:
            self.loader = "workers"  # a recipe may have dali, for other data
        if self.loader == "dali" and self.resize_mode != "crop":
            raise UserError(
                f"--loader dali crops to the centre: for --resize_mode {self.resize_mode} use "
                "--loader workers"
            )
        flags = []
        if self.evaluated_part != 1:
            given = "crop_ratio" if self.val_resize is None else "val_resize"
            flags.append(f"--{given} {getattr(self, given):g}")
        if self.eval_size not in (None, self.image_size):
            flags.append(f"--eval_size {self.eval_size}")
        for flag in flags:
            if self.dataset not in OWN_PICTURES:
                raise UserError(
                    f"{flag} needs pictures that are decoded while training, which those of "
                    f"--dataset {self.dataset} are not: leave it out"
                )
            if self.decode == "once" and self.dataset in FILES:
                raise UserError(f"{flag} needs --decode always: decoding once crops to the centre")
        if self.loader == "dali" and self.decode == "once" and self.dataset in FILES:
            raise UserError("--loader dali needs --decode always: it decodes while training")
        wanted = (
            flags or self.loader == "dali" or (self.crop == "resized" and self.decode == "auto")
        )
        if wanted and self.dataset in FILES:
            self.decode = "always"


def size_schedule(text: str) -> tuple[int, float]:
    """(pixels, fraction of the epochs): what --image_size_schedule says. Raises UserError."""
    found = re.fullmatch(r"(\d+):(0?\.\d*[1-9]\d*)", text)
    if found is None or int(found[1]) < 8:
        raise UserError(
            f"--image_size_schedule {text}: a size of 8 pixels or more, a colon, and a fraction of "
            "the epochs below 1, as in 24:0.5"
        )
    return int(found[1]), float(found[2])
