"""A setting without effect is left out with a line, or refused if it is essential; one of a recipe
gives way to the command line without a word."""

import pytest
from settings_of_pictures import FIELDS, another_value, flags_for, noted, refused, settings_of

import transformer_test
import vit_test
from resnet50_test import Settings
from utils.errors import UserError
from utils.optim.table import OPTIMIZERS
from utils.settings.config import parse


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("momentum", ["--optimizer", "adamw"]),
        ("momentum", ["--optimizer", "lamb"]),
        *((name, ["--optimizer", "adamw"]) for name in OPTIMIZERS["ngd"].own),
        ("adam_lr_scale", ["--optimizer", "ngd", "--ngd_adam", "false"]),
        ("adam_lr_scale", ["--optimizer", "ngd", "--ngd_norm", "gradient"]),
        ("ngd_alpha", ["--optimizer", "muon"]),
        ("warmup_epochs", ["--warmup_steps", "5"]),
        ("decay_all", ["--weight_decay", "0"]),
        ("cache_dir", ["--dataset", "cifar10", "--baseline", "false"]),
        ("test_fraction", ["--dataset", "shapes"]),
        ("val_is_validation", ["--dataset", "shapes"]),
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
        ("milestones", ["--sched", "cosine"]),
        ("min_lr", ["--sched", "constant"]),
        ("plateau_patience", ["--sched", "linear"]),
        ("epochs_for_sched", ["--sched", "constant"]),
        ("epochs_for_sched", ["--sched", "step", "--step_epochs", "1"]),
        ("nesterov", ["--optimizer", "muon"]),
        ("betas", ["--optimizer", "muon"]),
        ("eps", ["--optimizer", "sgd"]),
        ("warmup_lr", ["--warmup_epochs", "0"]),
        ("warmup_lr", ["--sched", "onecycle"]),
        ("warmup_epochs", ["--warmup_ratio", "0.1"]),
        ("warmup_ratio", ["--warmup_steps", "5"]),
        ("eval_on_start", ["--eval_every", "0"]),
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
def test_a_flag_without_effect_is_left_out_or_refused_with_the_reason(name, argv, write):
    without = settings_of(*argv)
    value, essential = another_value(name), FIELDS[name].metadata["essential"]
    in_file = dict(zip((flag.lstrip("-") for flag in argv[::2]), argv[1::2], strict=True))
    for given in (
        [*argv, *flags_for(name, value)],
        ["--config", write(in_file | {name: value})],
    ):
        if essential:
            text = refused(*given)
        else:
            settings, (text,) = noted(*given)
            assert getattr(settings, name) == getattr(without, name)
            text = text.removeprefix("note: ")
        assert text.startswith(f"--{name} has no effect: ")
        assert argv[0] in text or argv[1] in text
    # A recipe's setting is ignored if it is the command line that leaves it without effect.
    assert noted(*argv, "--config", write({name: value}))[1] == []
    default = FIELDS[name].default
    # Off, the warm-up changes nothing.
    if default is not None and name != "warmup_epochs":
        # It is said of a typed default, too; a complete config.yaml holds all defaults.
        if not essential:
            assert "has no effect" in noted(*argv, *flags_for(name, default))[1][0]
        assert getattr(settings_of(*argv, "--config", write({name: default})), name) == default


def test_mirror_images_are_for_what_measures_or_predicts(write, make_run):
    run = make_run("--flip_test")
    for argv in (["--dry_run"], ["--no_final_test"], ["--resume", run, "--export", "onnx"]):
        assert argv[-2 if "--export" in argv else -1] in refused(*argv, "--flip_test")
    recipe = write({"flip_test": True})
    assert settings_of("--no_final_test", "--config", recipe).eval_views == "mirror"
    for action in (["--eval_only"], ["--predict", "x"], []):
        assert settings_of("--resume", run, *action).eval_views == "mirror"  # kept
        assert settings_of("--resume", run, *action, "--no_flip_test").eval_views == "none"
    assert settings_of("--resume", run, "--eval_only", "--eval_views", "both").eval_views == "both"
    # Without effect, unsaid.
    assert settings_of("--resume", run, "--export", "onnx").eval_views == "mirror"


@pytest.mark.parametrize("flags", [["--compile"], ["--cuda_graphs", "on"]])
def test_engines_for_steps_are_for_training(flags, make_run):
    run = make_run()
    for action in (["--eval_only"], ["--predict", "x"], ["--export", "onnx"]):
        line = noted("--resume", run, *action, *flags)[1][-1]
        assert line == f"note: {flags[0]} has no effect: {action[0]} does not train"


def test_other_data_are_measured_as_they_are(make_run, tmp_path):
    """Flags of files have an effect on them, whatever the run's data; the run's own data have
    none."""
    run = make_run("--val_fraction", "0.2")
    for flags in (["--on_bad", "skip"], ["--encoding", "cp1252"], ["--report"], ["--flip_test"]):
        settings, lines = noted("--resume", run, "--eval_data", "x", *flags)
        assert lines == [] and settings.action.name == "eval_only"
    assert "--eval_data names the data" in refused(
        "--resume", run, "--eval_data", "x", "--data_dir", "y"
    )


def test_unfreeze_epoch_needs_a_frozen_backbone():
    assert "without --freeze_backbone" in refused("--unfreeze_epoch", "3")


def test_a_backbone_that_stays_frozen_has_no_rates_of_its_own():
    frozen = ["--pretrained", "run", "--freeze_backbone", "--layer_decay", "0.5"]
    (line,) = noted(*frozen)[1]
    assert line == "note: --layer_decay has no effect: the head alone is trained"
    assert noted(*frozen, "--unfreeze_epoch", "3")[1] == []


@pytest.mark.parametrize(
    ("settings_class", "flag"),
    [
        (Settings, "drop_path"),
        (vit_test.Settings, "drop_path"),
        (vit_test.Settings, "drop_rate"),
        (transformer_test.Settings, "dropout"),
        (transformer_test.Settings, "attention_dropout"),
        (transformer_test.Settings, "token_dropout"),
    ],
)
def test_nothing_is_dropped_while_the_backbone_is_frozen(settings_class, flag, write):
    flags = ["--pretrained", "run", "--freeze_backbone"]
    with pytest.raises(UserError, match=f"--{flag} has no effect: .*; leave it out"):
        parse(settings_class, [*flags, f"--{flag}", "0.2"], "")
    # Nothing is said of a recipe's.
    lines = []
    parse(settings_class, [*flags, "--config", str(write({flag: 0.2}))], "", lines.append)
    thawed = [*flags, "--unfreeze_epoch", "3", f"--{flag}", "0.2"]
    assert getattr(parse(settings_class, thawed, "", lines.append)[0], flag) == 0.2
    assert lines == []


def test_batches_by_tokens_are_accumulated_whatever_else_is_given():
    lines = []
    argv = ["--batch_tokens", "300", "--accumulation_steps", "4", "--global_batch", "64"]
    argv += ["--mixup", "0.2", "--mixup_block", "24"]
    settings, _ = parse(transformer_test.Settings, argv, "", lines.append)
    assert settings.accumulation_steps == 4
    assert {line.split()[1] for line in lines} == {"--mixup_block", "--global_batch"}


def test_a_warm_up_that_is_a_fraction_of_the_schedule_depends_on_its_length():
    constant = ["--sched", "constant", "--epochs_for_sched", "100"]
    # The warm-up of vit_test.py is a fraction by default.
    for settings_class, argv in ((Settings, ["--warmup_ratio", "0.1"]), (vit_test.Settings, [])):
        lines = []
        settings, _ = parse(settings_class, [*constant, *argv], "", lines.append)
        assert settings.epochs_for_sched == 100 and lines == []
        settings, _ = parse(settings_class, [*constant, "--warmup_steps", "5"], "", lines.append)
        assert settings.epochs_for_sched is None
        assert lines[0].startswith("note: --epochs_for_sched has no effect")


def test_the_warm_up_of_an_entry_may_begin_at_a_rate():
    """vit_test.py chooses its length only when the settings are complete."""
    lines = []
    settings, _ = parse(vit_test.Settings, ["--warmup_lr", "1e-6"], "", lines.append)
    assert settings.warmup_lr == 1e-6 and lines == []


def test_a_recipes_warm_up_that_the_schedule_replaces_may_have_any_length(write):
    flags = ["--sched", "onecycle", "--epochs", "3"]
    assert noted("--config", write({"warmup_epochs": 5.0}), *flags)[1] == []


def test_a_deterministic_run_on_a_cpu_keeps_its_number_of_threads():
    settings, lines = noted("--device", "cpu", "--deterministic")
    assert settings.deterministic and lines == []
