"""A setting without effect is refused; one of a recipe gives way to the command line."""

import pytest
from settings_of_pictures import FIELDS, another_value, flags_for, refused, settings_of

from utils.optim.table import OPTIMIZERS


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("momentum", ["--optimizer", "adamw"]),
        ("momentum", ["--optimizer", "lamb"]),
        *((name, ["--optimizer", "muon"]) for name in OPTIMIZERS["ngd"].own),
        ("warmup_epochs", ["--warmup_steps", "5"]),
        ("decay_all", ["--weight_decay", "0"]),
        ("deterministic", ["--device", "cpu"]),
        ("image_size", ["--dataset", "cifar10"]),
        ("test_fraction", ["--dataset", "shapes"]),
        ("on_bad", ["--dataset", "shapes"]),
        ("data_dir", ["--dataset", "shapes"]),
        ("padding_mode", ["--crop_padding", "0"]),
        ("workers", ["--dataset", "cifar10"]),
        ("alpha", ["--mixup", "none"]),
        ("alpha", ["--mixup", "none", "--cutmix_alpha", "1"]),
        *((name, ["--mixup", "none"]) for name in FIELDS if name.startswith("mixup_")),
        ("log_clean_accuracy", ["--mixup", "none"]),
        *((name, ["--mixup", "fixed"]) for name in FIELDS if name.startswith("meta_")),
        *(
            (name, ["--meta_form", "sample", "--mixup", "meta"])
            for name in ("meta_every", "meta_decay", "mixup_mode")
        ),
        ("gamma", ["--sched", "cosine"]),
        ("step_epochs", ["--sched", "multistep"]),
        ("milestones", ["--sched", "step"]),
        ("min_lr", ["--sched", "constant"]),
        ("plateau_patience", ["--sched", "linear"]),
        ("epochs_for_sched", ["--sched", "constant"]),
        ("warmup_epochs", ["--sched", "onecycle"]),
        ("warmup_steps", ["--sched", "onecycle"]),
        ("wandb_tags", ["--wandb", "disabled"]),
        *(
            (name, ["--sync_rule", "swap", "--strategy", "local"])
            for name in ("sync_base", "qsr_alpha")
        ),
        ("sync_from", ["--sync_rule", "qsr", "--strategy", "local"]),
    ],
)
def test_a_flag_without_effect_is_refused_with_the_reason(name, argv, write):
    settings_of(*argv)
    value = another_value(name)
    in_file = dict(zip((flag.lstrip("-") for flag in argv[::2]), argv[1::2], strict=True))
    for given in (
        [*argv, *flags_for(name, value)],
        ["--config", write(in_file | {name: value})],
    ):
        text = refused(*given)
        assert text.startswith(f"--{name} has no effect: ")
        assert argv[0] in text or argv[1] in text or "CPU" in text
    # A recipe's setting is ignored if it is the command line that leaves it without effect.
    settings_of(*argv, "--config", write({name: value}))
    default = FIELDS[name].default
    # Off, these two change nothing.
    if default is not None and name not in ("deterministic", "warmup_epochs"):
        # Typed, even the default is refused; a complete config.yaml holds all defaults.
        assert "has no effect" in refused(*argv, *flags_for(name, default))
        assert getattr(settings_of(*argv, "--config", write({name: default})), name) == default


def test_mirror_images_are_for_what_measures_or_predicts(write, make_run):
    run = make_run("--flip_test")
    for argv in (["--dry_run"], ["--no_final_test"], ["--resume", run, "--export", "onnx"]):
        assert argv[-2 if "--export" in argv else -1] in refused(*argv, "--flip_test")
    assert settings_of("--no_final_test", "--config", write({"flip_test": True})).flip_test
    for action in (["--eval_only"], ["--predict", "x"], []):
        assert settings_of("--resume", run, *action).flip_test  # kept
        assert not settings_of("--resume", run, *action, "--no_flip_test").flip_test
    assert settings_of("--resume", run, "--eval_only", "--flip_test").flip_test
    assert settings_of("--resume", run, "--export", "onnx").flip_test  # without effect, unsaid


def test_unfreeze_epoch_needs_a_frozen_backbone():
    assert "without --freeze_backbone" in refused("--unfreeze_epoch", "3")
