"""The settings of resnet50_test.py: which are tested, and how they are parsed."""

import pytest

from resnet50_test import Settings
from utils.errors import UserError
from utils.optim.table import OPTIMIZERS
from utils.settings.config import INVOCATION_ONLY, fields, parse
from utils.settings.local import OF_LOCAL

FIELDS = fields(Settings)
# They name files and runs, and have tests of their own.
CHOOSE_RUN = {
    "config",
    "host_config",
    "output",
    "resume",
    "eval_only",
    "eval_data",
    "predict",
    "predictions",
    "export",
}
OTHERS = sorted(FIELDS.keys() - CHOOSE_RUN)
KEPT = [name for name in OTHERS if name not in INVOCATION_ONLY]
# The flags that a setting needs to have an effect.
NEEDS = {
    name: ["--dataset", "imagefolder"]
    for name in (
        "test_fraction",
        "val_is_validation",
        "on_bad",
        "cache_dir",
        "workers",
        "decode",
        "loader",
        "resize_mode",
        "transparency",
        "white_level",
        "group_by",
    )
} | {
    **{
        key: ["--dataset", "csv"]
        for key in ("encoding", "image_column", "image_dir", "group_column")
    },
    "label_column": ["--dataset", "csv"],
    "crop_ratio": ["--dataset", "imagefolder"],
    "eval_size": ["--dataset", "imagefolder", "--image_size", "8"],
    "val_resize": ["--dataset", "imagefolder", "--image_size", "8"],
    "crop_area": ["--crop", "resized"],
    "gamma": ["--sched", "step"],
    "step_epochs": ["--sched", "step"],
    "milestones": ["--sched", "multistep"],
    "plateau_patience": ["--sched", "plateau"],
    "min_lr": ["--sched", "linear", "--lr", "1"],
    "lookahead_alpha": ["--lookahead_k", "5"],
    "freeze_backbone": ["--pretrained"],
    "unfreeze_epoch": ["--pretrained", "--freeze_backbone"],
    "warmup_lr": ["--warmup_epochs", "2", "--lr", "1"],
    "wandb_project": ["--wandb", "offline"],
    "wandb_entity": ["--wandb", "offline"],
    "wandb_tags": ["--wandb", "offline"],
}
for optimizer, entry in OPTIMIZERS.items():
    for own in entry.own:
        NEEDS.setdefault(own, ["--optimizer", optimizer])
NEEDS |= {name: ["--distributed"] for name in ("strategy", "sync_bn", "dist_timeout")}
NEEDS |= {name: ["--strategy", "local"] for name in OF_LOCAL}
NEEDS |= {"sync_from": ["--strategy", "local", "--sync_rule", "swap"]}
OF_DILOCO = ("outer_lr", "outer_momentum")
NEEDS |= {name: ["--strategy", "local", "--sync_rule", "diloco"] for name in OF_DILOCO}
NEEDS |= {name: ["--mixup", "fixed"] for name in FIELDS if name.startswith("mixup_")}
NEEDS |= {name: ["--mixup", "fixed"] for name in ("alpha", "log_clean_accuracy")}
NEEDS |= {name: ["--mixup", "meta"] for name in FIELDS if name.startswith("meta_")}


def settings_of(*argv) -> Settings:
    return parse(Settings, [str(word) for word in argv], "")[0]


def noted(*argv) -> tuple[Settings, list[str]]:
    """The settings, and what is said of those that are left out."""
    lines = []
    settings, _ = parse(Settings, [str(word) for word in argv], "", lines.append)
    return settings, lines


def refused(*argv) -> str:
    with pytest.raises(UserError) as caught:
        settings_of(*argv)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def another_value(name: str):
    """A valid value that is not the default."""
    field = FIELDS[name]
    meta, kind = field.metadata, field.type
    texts = {"save_every": "7m", "milestones": "3,7.5", "betas": "0.8,0.99"}
    texts |= {"time_budget": "10m", "image_size_schedule": "24:0.5"}
    texts |= {"auto_augment": "rand-m9-n3", "color_jitter": "0.4,0.3,0.2", "encoding": "cp1252"}
    texts |= {"best_by": "loss", "metrics": "f1_macro", "class_weights": "some where.yaml"}
    texts["trackers"] = "none"
    if name in texts:
        return texts[name]
    if meta["choices"]:
        choices = meta["choices"]() if callable(meta["choices"]) else meta["choices"]
        return next(choice for choice in reversed([*choices]) if choice != field.default)
    if kind is bool:
        return not field.default
    if kind == bool | None:  # which stands for on
        return False
    if kind in (str, str | None):
        return "some where"
    if kind in (float, float | None):
        return 0.25
    return (field.default or meta["low"] or 0) + (2 if name != "white_level" else -2)


def flags_for(name: str, value) -> list[str]:
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
