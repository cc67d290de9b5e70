"""Other names of flags, other spellings of values, and flags that stand for another."""

import pytest
from settings_of_pictures import FIELDS, NEEDS, another_value, flags_for, refused, settings_of

import vit_test
from resnet50_test import Settings
from utils.settings import TextSettings
from utils.settings.aliases import ALIASES, LOCAL, MEANINGS, VALUE_ALIASES
from utils.settings.config import DEFAULT, fields, parse, to_yaml
from utils.settings.elsewhere import BY_VALUE, PRESETS


@pytest.mark.parametrize("alias", sorted(ALIASES.keys() - {"drop", "max_seq_length"}))
def test_an_alias_sets_its_flag(alias, write, make_run):
    name = ALIASES[alias]
    assert name in FIELDS and alias not in FIELDS
    if name in ("resume", "eval_only"):  # these need a run
        argv, value = ["--resume", make_run()], True
        if name == "resume":
            argv, value = [], str(argv[1])
    elif name == "config":
        argv, value = [], str(write("epochs: 3", "other.yaml"))
    else:
        value, argv = another_value(name), NEEDS.get(name, [])
    text = flags_for(alias, value)[1]
    for flag in (
        {f"-{alias}"} if len(alias) == 1 else {f"--{alias}", f"--{alias}".replace("_", "-")}
    ):
        assert getattr(settings_of(*argv, flag, text), name) == value
    if name != "config":  # a recipe cannot name another one
        assert getattr(settings_of(*argv, "--config", write({alias: value})), name) == value


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        (name, alias, value)
        for name, table in VALUE_ALIASES.items()
        for alias, value in table.items()
        if name != "dataset"  # those are texts
    ],
)
def test_values_may_have_other_spellings(name, alias, value, write):
    needs = NEEDS.get(name, [])
    assert getattr(settings_of(*needs, f"--{name}", alias.upper()), name) == value
    assert getattr(settings_of(*needs, "--config", write({name: alias})), name) == value


def test_a_note_says_how_apexs_second_level_differs():
    lines = []
    settings = parse(Settings, ["--opt_level", "O2"], "", lines.append)[0]
    assert settings.precision == "fp16"
    assert [line[:24] for line in lines] == ["note: --opt_level O2: Ap"]
    parse(Settings, ["--opt_level", "O1"], "", lines.append)
    assert len(lines) == 1


def test_timms_name_of_a_compiler():
    assert parse(Settings, ["--torchcompile", "inductor"], "")[0].compile is True


def test_data_sets_have_torchtexts_names():
    for alias, value in VALUE_ALIASES["dataset"].items():
        assert parse(TextSettings, ["--dataset", alias.upper()], "")[0].dataset == value


def test_a_short_flag_stands_for_another(write):
    for given in (
        ["--ngd"],
        ["--ngd", "--optimizer", "ngd"],
        ["--config", write("ngd: true")],
        ["--config", write("ngd: true\noptimizer: ngd", "both.yaml")],
        ["--config", write("optimizer: sgd", "sgd.yaml"), "--ngd"],  # the command line wins
    ):
        settings, origin = parse(Settings, [*map(str, given)], "")
        assert settings.optimizer == "ngd" and origin["optimizer"] != DEFAULT
        assert "\noptimizer: ngd  # " in to_yaml(settings, origin)
    assert settings_of("--config", write("ngd: true"), "--optimizer", "sgd").optimizer == "sgd"
    assert settings_of("--config", write("ngd: false")).optimizer == "sgd"


def test_a_short_flag_with_another_value_is_refused(write):
    for argv in (["--ngd", "--optimizer", "sgd"], ["--opt", "adamw", "--ngd"]):
        text = refused(*argv)
        assert text.startswith("--ngd is short for --optimizer ngd") and argv[-1][-3:] in text
    path = write("ngd: true\noptimizer: lamb")
    assert f"{path}: ngd is short for --optimizer ngd" in refused("--config", path)
    assert "ngd: 1 is not true or false" in refused("--config", write("ngd: 1"))
    assert "did you mean --ngd?" in refused("--nggd")


def test_a_resumed_run_keeps_its_optimizer_under_its_short_flag(make_run):
    run = make_run("--ngd")
    assert settings_of("--resume", run, "--ngd").optimizer == "ngd"
    assert "--optimizer sgd" in refused("--resume", run, "--optimizer", "sgd")


def test_a_step_schedule_with_milestones_is_multistep(make_run):
    flags = ["--scheduler", "step", "--decay-points", "1", "5"]
    settings = settings_of(*flags)
    assert (settings.sched, settings.milestones) == ("multistep", "1,5")
    assert settings_of("--resume", make_run(*flags), *flags).sched == "multistep"
    assert settings_of("--sched", "step", "--step_epochs", "2").sched == "step"


def test_optimizers_of_local_steps_bring_their_strategy_and_its_alpha():
    for name, optimizer in LOCAL.items():
        settings = settings_of("--distributed", "--opt", name, "--alpha", "0.0175")
        assert (settings.optimizer, settings.strategy) == (optimizer, "local")
        assert (settings.qsr_alpha, settings.alpha) == (0.0175, 0.2)
    both = ["--distributed", "--opt", "localsgd", "--strategy", "ddp"]
    assert "localsgd is short for --strategy local" in refused(*both)


def test_an_alpha_with_two_meanings_is_refused():
    for more in ([], ["--mixup", "fixed"]):
        text = refused("--distributed", "--strategy", "local", "--alpha", "0.0175", *more)
        assert "--mixup 0.0175" in text and "--qsr_alpha 0.0175" in text
    both = settings_of("--distributed", "--strategy", "local", "--mixup", "0.3")
    assert (both.mixup, both.alpha) == ("fixed", 0.3)


# ---- flags that are no settings here ------------------------------------------------------------

# The keys that the recipes of the QSR repository have.
OF_QSR = {
    "bn": 1, "total_batch_size": 256, "physical_batch_size": 32, "bn_batches": 12, "nw": 6,
    "optimizer": "localsgd", "max_lr": 0.4, "wd": 0.0002, "warmup": 1, "warmup_epochs": 2,
    "momentum": 0.8, "nesterov": 0, "beta1": 0.9, "beta2": 0.99, "epochs": 10,
    "epochs_for_sche": 20, "label_smoothing": 0.2, "scheduler": "step", "decay_points": [4, 7],
    "steps_per_epoch": 39, "group_weight": 0, "log_per_step": 0,
}  # fmt: skip


def test_flags_from_elsewhere_are_none_of_ours_and_stand_for_settings_of_an_entry():
    known = {*FIELDS, *fields(vit_test.Settings)}
    # Some of their values are translated, all others are the setting's own.
    ours = {"alpha", "data_dir", "device", "model", "optimizer", "steps_per_epoch"}
    assert known & BY_VALUE.keys() == ours
    assert not (BY_VALUE.keys() | MEANINGS.keys()) & ALIASES.keys()
    assert BY_VALUE.keys() >= {*PRESETS}
    cases = [case for by_value in BY_VALUE.values() for case in by_value.values()]
    assert all(isinstance(case, str) or {*case} <= known | {"note"} for case in cases)


def test_a_recipe_of_the_qsr_repository(write):
    lines = []
    argv = [
        "--config",
        write(OF_QSR | {"model": "resnet152"}),
        "--alpha",
        "0.2",
        "--opt",
        "localsgd",
    ]
    settings, origin = parse(Settings, [*map(str, argv)], "", lines.append)
    assert (settings.depth, settings.global_batch, settings.batch_size) == (152, 256, 32)
    assert (settings.strategy, settings.optimizer, settings.nesterov) == ("local", "sgd", False)
    assert (settings.qsr_alpha, settings.bn_batches, settings.decay_all) == (0.2, 12, True)
    assert (settings.sched, settings.milestones, settings.log_every) == ("multistep", "4,7", 20)
    assert (settings.steps_per_epoch, settings.drop_last) == (39, True)
    assert origin["depth"] == "YAML" and f"depth: 152  # {origin['depth']}" in to_yaml(
        settings, origin
    )
    notes = [line.partition(" (")[0] for line in lines if line.startswith("note: bn 1")]
    assert notes == ["note: bn 1: it follows from the model"]
    text = refused(
        "--config", write({"steps_per_epoch": 3, "warmup": 5, "hostfile": "x", "epocs": 3})
    )
    assert "unknown settings 'epocs', did you mean epochs?; hostfile x: HOSTFILE=FILE bash" in text
    assert text.endswith("; warmup 5: write --warmup_epochs 5 or --warmup_steps 5")


def test_a_flag_stands_for_settings_which_may_be_given_beside_a_preset():
    def of(*argv):
        lines = []
        return parse(vit_test.Settings, [*argv, "--device", "cpu"], "", lines.append)[0], lines

    vit, lines = of(
        "--model", "vit_base", "--dim", "96", "--strong-aug", "1", "--mixup-alpha", "0.4"
    )
    assert (vit.model, vit.patch_size, vit.dim, vit.ffn) == ("vit", 16, 96, 3072)
    assert (vit.pooling, vit.positions, vit.image_size) == ("mean", "sincos", 224)
    assert (vit.auto_augment, vit.alpha, vit.mixup_mode) == ("rand-m10-n2", 0.4, "block")
    assert "--dim" not in lines[0] and "--layers 12" in lines[0]
    assert lines[1].startswith(
        "note: --strong-aug 1: taken as --auto_augment rand-m10-n2 --mixup_m"
    )
    plain, lines = of("--log-per-step", "0", "--strong-aug", "0", "--resume-pth", "None")
    assert (plain.log_every, plain.mixup, len(lines)) == (20, "none", 2)
    every, _ = of("--log-per-step", "1", "--save-freq", "30")
    assert (every.log_every, every.save_every) == (1, "30e")
    assert of("--opt", "momentum")[0].optimizer == "sgd"
    bare, _ = of("--no-aug")
    assert (bare.crop_padding, bare.hflip) == (0, 0.0)


def test_rounds_of_the_qsr_repository_without_alpha_are_constant():
    flags = ["--distributed", "--optimizer", "localadamw", "--init-h", "4", "--min-h", "2"]
    settings = settings_of(*flags, "--power", "2.0", "--alpha", "0")
    assert (settings.sync_rule, settings.sync_base) == ("constant", 4)
    assert settings_of(*flags, "--alpha", "0.01").sync_rule == "qsr"


def test_the_command_line_takes_precedence_over_a_recipes_names_from_elsewhere(write):
    recipe = {"strong_aug": 1, "log_per_step": 1, "group_weight": 0, "steps_per_epoch": 39}
    off = ["--strong-aug=0", "--log-per-step=0", "--group-weight=1", "--steps-per-epoch=-1"]
    settings = settings_of("--config", write(recipe), *off)
    assert (settings.mixup, settings.auto_augment, settings.log_every) == ("none", "none", 20)
    assert (settings.decay_all, settings.steps_per_epoch) == (False, None)
    path = write({"scheduler": "step"})
    settings = settings_of("--config", path, "--decay-points", "30", "40")
    assert (settings.sched, settings.milestones) == ("multistep", "30,40")
    path = write({"optimizer": "localadamw", "alpha": 0.0175})
    settings = settings_of("--distributed", "--config", path, "--optimizer", "adamw")
    assert (settings.optimizer, settings.strategy, settings.alpha) == ("adamw", "ddp", 0.2)
    settings = settings_of("--distributed", "--config", path, "--optimizer", "localsgd")
    assert (settings.strategy, settings.qsr_alpha) == ("local", 0.0175)
    text = refused("--distributed", "--config", path, "--alpha", "0", "--init-h", "4")
    assert "--sync_rule constant --sync_base 4" in text


def test_an_alpha_for_a_resumed_run_of_local_steps(make_run):
    run = make_run("--distributed", "--strategy", "local", "--sync_rule", "constant")
    text = refused("--resume", run, "--alpha", "0.02")
    assert "--mixup 0.02" in text and "--qsr_alpha 0.02" in text
    flags = ["--resume", run, "--optimizer", "localsgd", "--alpha", "0.0175", "--power", "2"]
    assert "add --sync_rule qsr, or leave it out" in refused(*flags)
    settings = settings_of(*flags, "--sync_rule", "qsr")
    assert (settings.sync_rule, settings.qsr_alpha) == ("qsr", 0.0175)
    text = refused("--resume", run, "--alpha", "0", "--init-h", "4")
    assert "--sync_rule constant --sync_base 4" in text


def test_a_note_where_the_qsr_repository_would_take_constant_rounds():
    for more, notes in ([], 1), (["--alpha", "0.01"], 1), (["--sync_rule", "qsr"], 0):
        lines = []
        parse(Settings, ["--distributed", "--optimizer", "localsgd", *more], "", lines.append)
        assert sum("--power 1, here 2" in line for line in lines) == notes
    parse(Settings, ["--opt", "localsgd", "--alpha", "0.01", "--power", "2"], "", lines.append)
    assert not any("--power" in line for line in lines)


def test_the_folder_of_all_runs_and_the_name_of_one():
    for argv in (["-n", "a", "-p", "runs/"], ["--model_path=runs", "--exp_name=a"]):
        assert settings_of(*argv).output == "runs/a"
    assert settings_of("-p", "10").log_every == 10  # --print-freq of PyTorch's example
    for data, name, value in (
        ("cifar100", "dataset", "cifar100"),
        ("./datasets/", "data_dir", "./datasets/"),
    ):
        assert getattr(settings_of("-d", data), name) == value


@pytest.mark.parametrize(
    "argv", [["-lr", "1"], ["-epochs=3"], ["-pretrained"], ["-ngd"], ["-no_nesterov"]]
)
def test_a_long_flag_with_one_hyphen_is_not_a_short_one_with_its_rest_as_value(argv):
    flag = argv[0].partition("=")[0]
    assert refused(*argv) == f"unknown flag {flag}, did you mean -{flag}?"
    assert all("did you mean --" in refused(flag) for flag in ("-no-aug", "-pin-mem"))


def test_values_that_other_parsers_take():
    assert settings_of("--nesterov", "0").nesterov is False
    assert settings_of("--eval-on-start=1").eval_on_start is True
    assert settings_of("--depth", "18.0").depth == 18
    assert "'18.5' is not" in refused("--depth", "18.5")
    assert settings_of("--optimizer", "FusedAdam").optimizer == "fusedadam"
    assert settings_of("--clip", "inf").clip == 0
