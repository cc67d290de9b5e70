"""Other names of flags, other spellings of values, and flags that stand for another."""

import pytest
from settings_of_pictures import FIELDS, NEEDS, another_value, flags_for, refused, settings_of

from resnet50_test import Settings
from utils.settings import TextSettings
from utils.settings.aliases import ALIASES, LOCAL, VALUE_ALIASES
from utils.settings.config import DEFAULT, parse, to_yaml


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
