#!/usr/bin/env python3
"""Trains a Vision Transformer, or any classifier of timm, on pictures: by default on CIFAR-10.

python vit_test.py
python vit_test.py my_pictures --model convnext_tiny --pretrained
python vit_test.py --model my_net.py:Net
python vit_test.py --model list 'vit_*'
python vit_test.py --resume
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from utils.entry import Entry, end_process, print_lines
from utils.errors import UserError, one_line
from utils.setting import setting
from utils.settings import ImageSettings, changed
from utils.settings.transfer import is_published

MODEL = "model"  # heading in --help
OWN = "vit"  # the value of --model that takes these sizes
SIZES = ("patch_size", "layers", "dim", "heads", "ffn", "pooling", "positions")
HUBS = ("hf-hub", "hf_hub", "local-dir")  # where --model takes timm's layout from, as timm does
BY_DATA = ("num_classes", "in_chans", "img_size")  # arguments that the pictures decide here
WARMUP = 0.05  # fraction of the epochs, by default
# Settings of the model -> arguments of timm's constructors.
ARGUMENTS = {"drop_rate": "drop_rate", "drop_path": "drop_path_rate"}


@dataclass
class Settings(ImageSettings):
    """The settings of this entry: those of every run on pictures, and those of its models."""

    entry = "vit_test.py"
    is_transformer = True
    published_for = "the models of --model list"
    of_backbone = ARGUMENTS

    epochs: int = changed(ImageSettings, "epochs", 100)
    optimizer: str = changed(ImageSettings, "optimizer", "adamw")
    warmup_epochs: float | None = changed(  # type: ignore[assignment]  # `validate` sets it
        ImageSettings,
        "warmup_epochs",
        None,
        default_text="a twentieth of --epochs_for_sched or --epochs",
    )
    pretrained: str | None = changed(
        ImageSettings,
        "pretrained",
        help="Start from these weights: without a value those that timm has published for --model "
        "(in YAML: published); or a .safetensors or .pth file, or the folder of a run or of the "
        "Hugging Face hub. A head for other classes is replaced, and positions are resampled to "
        "other sizes of pictures",
        bare="published",
    )

    model: str = setting(
        OWN,
        "vit, with the sizes below; the name of any classifier of timm; hf-hub:OWNER/NAME or "
        "local-dir:FOLDER, one in timm's layout; or FILE.py:CLASS, a class of your own, made by "
        "CLASS(classes). `--model list [PATTERN]` prints timm's names",
        group=MODEL,
    )
    patch_size: int = setting(4, "Side of a patch of vit", group=MODEL, low=1, unit="pixels")
    layers: int = setting(9, "Blocks of vit", group=MODEL, low=1)
    dim: int = setting(
        192, "Width of a token's representation in vit; a multiple of --heads", group=MODEL, low=1
    )
    heads: int = setting(3, "Attention heads of vit", group=MODEL, low=1)
    ffn: int = setting(768, "Width of the feed-forward layers of vit", group=MODEL, low=1)
    pooling: str = setting(
        "cls", "What the classifier of vit reads: an additional token, or the mean of all patches",
        group=MODEL, choices=("cls", "mean"),
    )  # fmt: skip
    positions: str = setting(
        "learned", "Positions of vit's patches: learned, or fixed sines and cosines",
        group=MODEL, choices=("learned", "sincos"),
    )  # fmt: skip
    drop_rate: float = setting(
        0.0, "Dropout before the classifier", group=MODEL, low=0, below=1
    )  # fmt: skip
    drop_path: float = setting(
        0.0,
        "Stochastic depth: probability of skipping the last block, decreasing towards the first",
        group=MODEL, low=0, below=1,
    )  # fmt: skip
    grad_checkpointing: bool = setting(
        False,
        "Keep no activations inside the blocks, and compute them again in the backward pass: less "
        "memory, a third more time. BatchNorm's running statistics in the blocks are then updated "
        "twice in a micro-batch",
        group=MODEL, resume="free",
    )  # fmt: skip
    model_kwargs: str | None = setting(
        None,
        "More arguments of the model's constructor, as in pos_drop_rate=0.1,proj_drop_rate=0.1",
        group=MODEL,
    )  # fmt: skip

    def __post_init__(self):
        if self.model.partition(":")[0] in HUBS:  # so the run needs no hub when it is resumed
            folder, self.model, arguments = _at_hub(self.model)
            given = [f"{n}={v}" for n, v in arguments.items() if n not in BY_DATA]
            self.model_kwargs = ",".join(filter(None, [*given, self.model_kwargs])) or None
            if is_published(self.pretrained):
                self.pretrained = folder

    @property
    def published_weights(self) -> tuple[str, str] | None:  # type: ignore[override]  # only read
        return None if self.model == OWN or ":" in self.model else ("timm", self.model)

    @property
    def heads_of_vit(self) -> int | None:  # type: ignore[override]  # only read
        return self.heads if self.model == OWN else None

    def ineffective(self):
        yield from super().ineffective()
        if self.model != OWN:
            reason = f"--model {self.model} has its own sizes; see --model_kwargs"
            yield SIZES, reason, "model"
        if ":" in self.model:
            yield ARGUMENTS, "a class of your own takes --model_kwargs", "model"

    def validate(self):
        if self.warmup_epochs is None:
            given = self.warmup_steps is not None or self.warmup_ratio is not None
            none = given or "warmup" not in self.schedule_flags
            self.warmup_epochs = 0.0 if none else WARMUP * (self.epochs_for_sched or self.epochs)
            if self.time_budget is not None and not none:  # the epochs are not known
                self.warmup_epochs, self.warmup_ratio = 0.0, WARMUP
        super().validate()
        if self.image_size_schedule is not None and self.model == OWN:
            raise UserError(
                f"--image_size_schedule {self.image_size_schedule}: --model vit has positions for "
                "pictures of one size: leave the flag out"
            )
        if self.dim % self.heads:
            raise UserError(
                f"--dim {self.dim} is not a multiple of --heads {self.heads}: each head gets an "
                "equal part"
            )


def _at_hub(place: str) -> tuple[str, str, dict]:
    """The folder of hf-hub:OWNER/NAME[@REVISION] or local-dir:FOLDER, and from its config.json the
    name of timm's model and arguments of its constructor."""
    source, _, name = place.partition(":")
    try:
        folder = name
        if source != "local-dir":
            from huggingface_hub import snapshot_download

            repository, _, revision = name.partition("@")
            files = ["config.json", "model.safetensors"]
            folder = snapshot_download(repository, revision=revision or None, allow_patterns=files)
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return folder, config["architecture"], config.get("model_args") or {}
    except KeyError:
        raise UserError(f"--model {place}: its config.json names no model of timm") from None
    except Exception as error:  # network, disk, no such model, no such package
        raise UserError(
            f"--model {place}: {one_line(error, 200)}; where there is a network, bring the folder "
            "by `hf download OWNER/NAME --local-dir FOLDER`, and give --model local-dir:FOLDER"
        ) from None


def build_model(settings: Settings, card):
    """The model for the pictures and classes of `card` (a ModelCard), on the CPU."""
    from utils.models import named

    name, classes = settings.model, len(card.classes)
    pictures = {"height": card.height, "width": card.width, "channels": card.channels}
    arguments = named.arguments_of(settings.model_kwargs)
    for flag, argument in ARGUMENTS.items():
        if rate := getattr(settings, flag):
            arguments[argument] = rate
    if name == OWN:
        sizes = {key: getattr(settings, key) for key in SIZES}
        model = named.own_vit(classes, **pictures, **sizes, arguments=arguments)
    elif ":" in name:
        model = named.own_class(name, classes, arguments)
    else:
        model = named.timm_model(name, classes, **pictures, arguments=arguments)
    named.check_pictures(model, name, classes, **pictures)
    if settings.action.trains:
        named.check_training(model, name, **pictures)
    size = settings.image_size  # in training
    if size is not None and settings.eval_size not in (None, size):
        try:
            named.check_pictures(model, name, classes, size, size, card.channels)
        except UserError:
            raise UserError(
                f"--eval_size {settings.eval_size}: --model {name} takes pictures of a single "
                "size; leave it out"
            ) from None
    if settings.grad_checkpointing:
        named.checkpoint_gradients(model, name)
    return model


def check_model(settings: Settings) -> None:
    """UserError if there is no such model, whatever the pictures are."""
    from utils.models import named

    arguments = named.arguments_of(settings.model_kwargs)
    for flag, argument in ARGUMENTS.items():
        # A run from before there was this check can still be resumed: its flag counts.
        new = settings.action.trains and settings.resume is None
        if new and getattr(settings, flag) and argument in arguments:
            raise UserError(
                f"--{flag} and --model_kwargs {argument}={arguments[argument]} set the same: leave "
                "one of them out"
            )
    if settings.model != OWN:
        named.check_name(settings.model)


def model_name(settings: Settings) -> str:
    if settings.model == OWN:
        return f"vit{settings.layers}x{settings.dim}p{settings.patch_size}"
    return settings.model.rpartition(":")[2]


def _names(words: list[str]) -> list[str]:
    """timm's names that match the pattern in `words`, if it is none of the flags."""
    from utils.models.named import timm_names

    return timm_names(*[word for word in words if not word.startswith("-")])


ENTRY = Entry(Settings, build_model, model_name, __doc__, check_model)


def main(argv: list[str] | None = None, started: float | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--model=list"]:
        words = ["--model", "list", *words[1:]]
    if "list" in words and words[words.index("list") - 1] == "--model":
        return print_lines(lambda: _names(words[words.index("list") + 1 :][:1]))
    return ENTRY.main(argv, started)


if __name__ == "__main__":
    end_process(main())
