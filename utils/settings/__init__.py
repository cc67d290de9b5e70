"""The settings that entries share; an entry adds those of its model (see resnet50_test.py).

Each group of flags has a file. `--help` lists the groups from the last base class to the first.
"""

from dataclasses import dataclass
from typing import ClassVar

from .classes import ClassSettings
from .config import changed
from .data import DataSettings
from .distributed import DistributedSettings
from .engine import EngineSettings
from .images import PictureSettings
from .local import LocalSettings
from .mixing import MixingSettings
from .optimization import OptimizationSettings
from .run import RunSettings
from .texts import TextFlags
from .transfer import TransferSettings


@dataclass
class TrainSettings(
    RunSettings,
    LocalSettings,
    DistributedSettings,
    EngineSettings,
    TransferSettings,
    MixingSettings,
    ClassSettings,
    OptimizationSettings,
    DataSettings,
):
    """What every training run has, whatever it trains on."""

    eval_views = "none"  # a flag of pictures
    image_size_schedule = None  # type: str | None  # likewise
    batch_tokens = None  # type: int | None  # a flag of texts
    grad_checkpointing = False  # a flag of vit_test.py


@dataclass
class ImageSettings(PictureSettings, TrainSettings):
    """What training on pictures adds."""

    task = "pictures"
    bf16_helps_cpus = True  # those that compute in it
    # (library, name) of the weights published for the model, None if there are none; and the flags
    # with which there are some, for the message.
    published_weights: ClassVar[tuple[str, str] | None] = None
    published_for: ClassVar[str] = ""
    heads_of_vit: ClassVar[int | None] = None  # of our ViT, as its weights do not show them


@dataclass
class TextSettings(TextFlags, TrainSettings):
    """What training on texts adds."""

    task = "texts"
    is_transformer = True
    bf16_helps_cpus = False  # docs/text.md
    reads_in_workers = False  # more --workers may read the data faster

    epochs: int = changed(TrainSettings, "epochs", 5)
    optimizer: str = changed(TrainSettings, "optimizer", "adamw")
    pretrained: str | None = changed(
        TrainSettings,
        "pretrained",
        help="Start from these weights: without a value those of --model NAME|FOLDER (in YAML: "
        "published); or the folder of a run, with its tokenizer, or a .safetensors or .pth file; a "
        "head for other classes is replaced",
        bare="published",
    )
    predict: str | None = changed(
        TrainSettings,
        "predict",
        help="Classify the texts of a .csv, .tsv or .jsonl file, or the lines of a .txt file, with "
        "the model named by --resume",
    )
    predictions: str | None = changed(
        TrainSettings,
        "predictions",
        help="CSV file for the predictions: line, text, class, and the probability of each class",
    )
    export: str | None = changed(
        TrainSettings,
        "export",
        help="Write the model named by --resume for use elsewhere, with its tokenizer",
    )
