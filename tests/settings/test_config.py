"""Settings: flags, YAML, their order, their limits, and what a resumed run may change."""

import dataclasses
import itertools
import signal

import pytest
import torch
import yaml

from resnet50_test import Settings, main
from utils.data.images.sources import IMAGE_DATASETS
from utils.errors import UserError
from utils.optim.factory import NGD_SETTINGS, OPTIMIZERS
from utils.settings.config import (
    ALIASES,
    COMMAND_LINE,
    DEFAULT,
    FILE,
    INVOCATION_ONLY,
    VALUE_ALIASES,
    fields,
    parse,
    to_yaml,
)

FIELDS = fields(Settings)
# name files and runs: tested one by one
CHOOSE_RUN = {"config", "output", "resume", "eval_only", "predict", "predictions", "export"}
OTHERS = sorted(FIELDS.keys() - CHOOSE_RUN)
KEPT = [name for name in OTHERS if name not in INVOCATION_ONLY]
# What a setting needs beside it to have an effect.
NEEDS = {
    name: ["--dataset", "imagefolder"]
    for name in ("image_size", "test_fraction", "on_bad", "cache_dir", "workers")
} | {
    "gamma": ["--sched", "step"],
    "step_epochs": ["--sched", "step"],
    "milestones": ["--sched", "multistep"],
    "plateau_patience": ["--sched", "plateau"],
    "min_lr": ["--sched", "linear", "--lr", "1"],
    "lookahead_alpha": ["--lookahead_k", "5"],
    "freeze_backbone": ["--pretrained"],
    "unfreeze_epoch": ["--pretrained", "--freeze_backbone"],
    "wandb_project": ["--wandb", "offline"],
    "wandb_tags": ["--wandb", "offline"],
}
NEEDS |= {name: ["--ngd"] for name in NGD_SETTINGS}
NEEDS |= {name: ["--distributed"] for name in ("strategy", "sync_bn", "dist_timeout")}
NEEDS |= {name: ["--mixup", "fixed"] for name in FIELDS if name.startswith("mixup_")}
NEEDS |= {name: ["--mixup", "fixed"] for name in ("alpha", "log_clean_accuracy")}
NEEDS |= {name: ["--mixup", "meta"] for name in FIELDS if name.startswith("meta_")}
NEEDS |= {name: ["--mixup", "fixed"] for name in FIELDS if name.startswith("mixup_")}
NEEDS |= {name: ["--mixup", "fixed"] for name in ("alpha", "log_clean_accuracy")}
NEEDS |= {name: ["--mixup", "meta"] for name in FIELDS if name.startswith("meta_")}


def settings_of(*argv) -> Settings:
    return parse(Settings, [str(word) for word in argv], "")[0]


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
    if name in ("save_every", "milestones"):
        return {"save_every": "7m", "milestones": "3,7.5"}[name]
    if meta["choices"]:
        choices = meta["choices"]() if callable(meta["choices"]) else meta["choices"]
        return next(choice for choice in reversed([*choices]) if choice != field.default)
    if kind is bool:
        return not field.default
    if kind in (str, str | None):
        return "some where"
    if kind in (float, float | None):
        return 0.25
    return (field.default or meta["low"] or 0) + 2


def flags_for(name: str, value) -> list[str]:
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


@pytest.fixture
def write(tmp_path):
    def write(content, name="settings.yaml"):
        path = tmp_path / name
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """make_run(flags) -> the folder of a run that was started with them."""
    monkeypatch.chdir(tmp_path)

    def make(*argv):
        folder = tmp_path / "runs" / "ä run"
        folder.mkdir(parents=True)
        settings, origin = parse(Settings, [*map(str, argv)], "")
        text = f"# {Settings.entry}\n{to_yaml(settings, origin)}"
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        return folder

    return make


# ---- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_flag_in_both_spellings(name):
    value, needs = another_value(name), NEEDS.get(name, [])
    flag, text = flags_for(name, value)
    hyphens = flag.replace("_", "-")
    for argv in ([flag, text], [hyphens, text], [f"{flag}={text}"], [f"{hyphens}={text}"]):
        result = getattr(settings_of(*needs, *argv), name)
        assert result == value and type(result) is type(value)


@pytest.mark.parametrize("alias", ALIASES)
def test_alias(alias, write, make_run):
    name = ALIASES[alias]
    assert name in FIELDS and alias not in FIELDS
    if name in ("resume", "eval_only"):  # these need a run
        argv, value = ["--resume", make_run()], True
        if name == "resume":
            argv, value = [], str(argv[1])
    else:
        value, argv = another_value(name), NEEDS.get(name, [])
    text = flags_for(alias, value)[1]
    for flag in (
        {f"-{alias}"} if len(alias) == 1 else {f"--{alias}", f"--{alias}".replace("_", "-")}
    ):
        assert getattr(settings_of(*argv, flag, text), name) == value
    assert getattr(settings_of(*argv, "--config", write({alias: value})), name) == value


def test_one_letter_flags_take_their_value_attached():
    assert settings_of("-b64").batch_size == 64


@pytest.mark.parametrize("name", [n for n in OTHERS if FIELDS[n].type is bool])
def test_booleans(name):
    def value(*argv):
        return getattr(settings_of(*NEEDS.get(name, []), *argv), name)

    hyphens = name.replace("_", "-")
    for on in ([f"--{name}"], [f"--{hyphens}"], *([f"--{name}", w] for w in ("true", "Yes", "on"))):
        assert value(*on) is True
    for off in ([f"--no_{name}"], [f"--no-{hyphens}"], [f"--{name}", "false"], [f"--{name}=no"]):
        assert value(*off) is False
    assert value(f"--no_{name}", f"--{name}") is True  # the last one counts
    assert f"--{name}" in refused(*NEEDS.get(name, []), f"--{name}", "maybe")


def test_a_switch_with_a_third_value(write):
    """It takes what a bool takes, as it was one: recipes and the settings of runs say so."""

    def value(*argv):
        return settings_of(*argv).cuda_graphs

    assert value() == value("--cuda_graphs", "auto") == "auto"
    for on in (
        ["--cuda_graphs"],
        ["--cuda-graphs"],
        ["--cuda_graphs", "true"],
        ["--cuda_graphs=On"],
    ):
        assert value(*on) == "on"
    for off in (["--no_cuda_graphs"], ["--no-cuda-graphs"], ["--cuda_graphs", "No"]):
        assert value(*off) == "off"
    assert value("--no_cuda_graphs", "--cuda_graphs") == "on"  # the last one counts
    for text, meant in (("true", "on"), ("false", "off"), ("on", "on"), ("auto", "auto")):
        assert value("--config", write(f"cuda_graphs: {text}\n")) == meant
    said = refused("--cuda_graphs", "maybe")
    assert "--cuda_graphs" in said and "auto, on, off" in said


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        (name, alias, value)
        for name, table in VALUE_ALIASES.items()
        for alias, value in table.items()
    ],
)
def test_other_spellings_of_a_value(name, alias, value, write):
    needs = NEEDS.get(name, [])
    assert getattr(settings_of(*needs, f"--{name}", alias.upper()), name) == value
    assert getattr(settings_of(*needs, "--config", write({name: alias})), name) == value


@pytest.mark.parametrize("flag", ["--epo", "--batch", "--optim", "--learning_rate", "--no_epochs"])
def test_no_abbreviations(flag):
    assert f"unknown flag {flag}" in refused(flag, "3")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--epocs", "3"], ["--epocs", "did you mean --epochs?"]),
        (["--weight-decy", "0"], ["--weight-decy", "did you mean --weight_decay?"]),
        (["--smoothin", "0"], ["did you mean --label_smoothing?"]),  # by way of an alias
        (["--qqqq"], ["unknown flag --qqqq"]),
        (["resnet18"], ["'resnet18' stands alone"]),
        (["--epochs"], ["--epochs", "expected one argument"]),
        (["--epochs", "many"], ["--epochs", "'many'", "a whole number"]),
        (["--epochs", "1.5"], ["--epochs", "a whole number"]),
        (["--epochs", "0"], ["--epochs", "1 or more"]),
        (["--lr", "0"], ["--lr", "above 0"]),
        (["--lr", "-1"], ["--lr", "above 0"]),
        (["--lr", "nan"], ["--lr"]),
        (["--lr", "inf"], ["--lr"]),
        (["--hflip", "1.01"], ["--hflip", "up to 1"]),
        (["--momentum", "1"], ["--momentum", "below 1"]),
        (["--ngd", "--ngd_alpha", "0"], ["--ngd_alpha", "above 0"]),
        (["--ngd", "--ngd_eta", "1.5"], ["--ngd_eta", "above 0 up to 1"]),
        (["--ngd", "--ngd_axes", "rows"], ["--ngd_axes", "one of all, channels"]),
        (["--lookahead_k", "0"], ["--lookahead_k", "1 or more"]),
        (["--lookahead_alpha", "0.5"], ["--lookahead_alpha has no effect", "--lookahead_k"]),
        (["--ngd", "--ngd_norm", "unit"], ["--ngd_norm", "one of fixed, gradient"]),
        (["--ngd_norm", "fixed"], ["--ngd_norm has no effect", "--optimizer sgd"]),
        (["--seed", 2**32], ["--seed", "up to"]),
        (["--depth", "20"], ["--depth", "18, 34, 50, 101, 152"]),
        (["--optimizer", "adam"], ["--optimizer", "did you mean adamw?"]),
        (["--batch_size", "none"], ["--batch_size", "a whole number"]),
        (["--subset", "1.5"], ["--subset 1.5", "whole number"]),
        (["--save_every", "soon"], ["--save_every soon", "10m"]),
        (["--save_every", "0"], ["--save_every 0"]),
        (["--save_every", "-5m"], ["--save_every"]),
        (["--warmup_epochs", "3", "--epochs", "2"], ["--warmup_epochs", "--epochs 2"]),
        (["--eval_only"], ["--eval_only", "--resume"]),
        (["--predict", "x"], ["--predict", "--resume RUN"]),
        (["--export", "onnx"], ["--export", "--resume RUN"]),
        (["--export", "onnx", "--eval_only"], ["--eval_only and --export", "one at a time"]),
        (["--export", "tflite"], ["--export", "onnx, safetensors"]),
        (["--sched", "multistep", "--milestones", "30,20"], ["--milestones 30,20", "30,60,80"]),
        (["--sched", "multistep", "--milestones", "x"], ["--milestones x", "30,60,80"]),
        (["--min_lr", "1"], ["--min_lr 1.0 is above --lr 0.1"]),
        (["--freeze_backbone"], ["--freeze_backbone", "--pretrained"]),
        (["--early_stop_patience", "3", "--eval_every", "0"], ["--eval_every 0"]),
        (
            ["--pretrained", "--freeze_backbone", "--unfreeze_epoch", "50"],
            ["--unfreeze_epoch 50", "--epochs 50"],
        ),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["--config", "."], ["--config", "Is a directory"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_wrong_flags_are_named_with_the_way_out(argv, parts):
    text = refused(*argv)
    assert [part for part in parts if part not in text] == []


def test_defaults_that_depend_on_others():
    assert (settings_of().lr, settings_of().weight_decay) == (0.1, 5e-4)
    adamw = settings_of("--optimizer", "adamw")
    assert (adamw.lr, adamw.weight_decay) == (1e-3, 0.05)
    assert settings_of("--optimizer", "adamw", "--lr", "0.5").lr == 0.5
    ngd = settings_of("--ngd", "--ngd_norm", "gradient")  # like sgd, where it steps like sgd
    assert (ngd.lr, ngd.weight_decay, ngd.momentum) == (0.1, 5e-4, 0.9)
    assert settings_of("--ngd").lr == OPTIMIZERS["ngd"].lr < 0.1
    momenta = {name: settings_of("--optimizer", name).momentum for name in OPTIMIZERS}
    assert momenta == {
        "sgd": 0.9, "adamw": None, "lamb": None, "muon": 0.95, "madgrad": 0.9, "ngd": 0.9,
    }  # fmt: skip


# ---- short flags --------------------------------------------------------------------------------


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


def test_a_short_flag_and_another_value_are_refused(write):
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


# ---- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("epocs: 3", ["'epocs'", "did you mean epochs?"]),
        ("weigth-decay: 3", ["did you mean weight_decay?"]),
        ("42: 3", ["unknown setting 42"]),
        ("epochs: many", ["epochs", "'many'", "a whole number"]),
        ("epochs: 1.5", ["epochs", "1.5", "a whole number"]),
        ("epochs: true", ["epochs", "True", "a whole number"]),
        ("epochs: [1, 2]", ["epochs", "a whole number"]),
        ("epochs:", ["epochs", "a value is needed"]),
        ("data_dir: [a, b]", ["data_dir", "a text"]),
        ("output: {a: b}", ["output", "a text"]),
        ("compile: 1", ["compile", "true or false"]),
        ("lr: .inf", ["lr", "above 0"]),
        ("label_smoothing: 1", ["label_smoothing", "below 1"]),
        ("dataset: cifar11", ["dataset", "did you mean cifar10?"]),
        ("resume: false", ["resume"]),
        ("epochs: [1", ["no valid YAML"]),
        ("a: b: c", ["no valid YAML"]),
        ("epochs: !!python/object/apply:os.getcwd []", ["no valid YAML"]),
        ("- epochs\n- 3", ["'name: value' lines are needed"]),
        ("epochs 3", ["'name: value' lines are needed"]),
        ("bs: 3\nbatch_size: 4", ["batch_size is set twice"]),
        ("batch-size: 3\nbatch_size: 4", ["batch_size is set twice"]),
    ],
    ids=str,
)
def test_wrong_yaml_is_named_with_its_file(content, parts, write):
    path = write(content, "mit Größe.yaml")
    text = refused("--config", path)
    assert [part for part in [str(path), *parts] if part not in text] == []


def test_yaml_that_is_no_text(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00epochs")
    assert "no valid YAML" in refused("--config", path)


@pytest.mark.parametrize(
    ("content", "name", "value"),
    [
        ("lr: 1e-3", "lr", 1e-3),  # a text for YAML 1.1
        ("lr: 1", "lr", 1.0),
        ("depth: 18.0", "depth", 18),
        ("save_every: 500", "save_every", "500"),
        ("channels-last: off", "channels_last", False),
        ("clip: null", "clip", None),
        ("# nothing", "epochs", 50),
        ("", "epochs", 50),
    ],
)
def test_yaml_values(content, name, value, write):
    result = getattr(settings_of("--config", write(content)), name)
    assert result == value and type(result) is type(value)


def test_command_line_wins_over_yaml_and_yaml_over_defaults(write):
    path = write({"epochs": 7, "batch-size": 32, "wd": 0.25})
    settings, origin = parse(Settings, ["--config", str(path), "--bs", "16"], "")
    assert (settings.epochs, settings.batch_size, settings.weight_decay) == (7, 16, 0.25)
    names = ("epochs", "batch_size", "weight_decay", "seed", "config")
    assert [origin[name] for name in names] == [FILE, COMMAND_LINE, FILE, DEFAULT, COMMAND_LINE]
    assert origin.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", KEPT)
def test_to_yaml_and_back(name, write):
    """What a run writes as config.yaml is taken back by --config, defaults without effect too."""
    first, origin = parse(
        Settings, [*NEEDS.get(name, []), *flags_for(name, another_value(name))], ""
    )
    text = to_yaml(first, origin)
    assert len(text.splitlines()) == len(FIELDS)
    [line] = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    assert line.endswith(f"# {COMMAND_LINE}")
    path = write(text)
    of_one_start = [flag for flag in NEEDS.get(name, []) if flag == "--distributed"]
    again = settings_of("--config", path, *of_one_start)
    assert dataclasses.replace(again, config=None) == first


@pytest.mark.parametrize("dataset", IMAGE_DATASETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_config_of_every_combination_is_accepted_again(dataset, optimizer, write):
    flags = ["--dataset", dataset, "--optimizer", optimizer, "--crop_padding", 0]
    flags += ["--weight_decay", 0, "--warmup_steps", 5]
    settings, origin = parse(Settings, [*map(str, flags)], "")
    again = settings_of("--config", write(to_yaml(settings, origin)))
    assert dataclasses.replace(again, config=None) == settings


@pytest.mark.parametrize(
    "text",
    [
        "a: b # c",
        "größe ✓",
        "true",
        "007",
        "1e3",
        "it's",
        '"x"',
        " x ",
        "a\nb",
        "caf\udce9",
        "x " * 999,
    ],
)
def test_awkward_paths_survive_the_round_trip(text, write):
    settings, origin = parse(Settings, ["--output", text, "--data_dir", text], "")
    again = settings_of("--config", write(to_yaml(settings, origin)))
    # A run's own folder is written down, but commented out: another run must not take it over.
    assert (again.output, again.data_dir) == (None, text)


# ---- settings without effect --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("momentum", ["--optimizer", "adamw"]),
        ("momentum", ["--optimizer", "lamb"]),
        *((name, ["--optimizer", "muon"]) for name in NGD_SETTINGS),
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
    ],
)
def test_flag_without_effect_is_refused_with_the_reason(name, argv, write):
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
    # A recipe's setting gives way to the command line.
    settings_of(*argv, "--config", write({name: value}))
    default = FIELDS[name].default
    # Off, these two change nothing.
    if default is not None and name not in ("deterministic", "warmup_epochs"):
        # Typed, even the default is a misunderstanding; a complete config.yaml holds all defaults.
        assert "has no effect" in refused(*argv, *flags_for(name, default))
        assert getattr(settings_of(*argv, "--config", write({name: default})), name) == default


# ---- mixup ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "mixup", "alpha", "mixing"),
    [
        (["--mixup", "0.4"], "fixed", 0.4, "fixed"),
        (["--mixup-alpha", "0.4"], "fixed", 0.4, "fixed"),
        (["--mixup", "0"], "none", 0.2, "none"),
        (["--mixup", "0", "--cutmix", "1.0"], "none", 0.2, "cutmix"),
        (["--mixup", "0.4", "--alpha", "0.4"], "fixed", 0.4, "fixed"),
        (["--meta_learning"], "meta", 0.2, "meta"),
        (["--meta-learning", "--alpha", "0.5", "--cutmix-alpha", "1"], "meta", 0.5, "meta, cutmix"),
    ],
)
def test_mixup_by_a_number_or_a_word(argv, mixup, alpha, mixing, write):
    in_file, words = {}, [*argv, "end"]
    for word, value in itertools.pairwise(words):
        if word.startswith("--"):
            in_file[word[2:]] = True if value.startswith("--") or value == "end" else float(value)
    for settings in (settings_of(*argv), settings_of("--config", write(in_file))):
        assert (settings.mixup, settings.alpha, settings.mixing) == (mixup, alpha, mixing)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--mixup", "0.4", "--alpha", "0.3"], ["--mixup 0.4 is short for --alpha", "0.3"]),
        (["--mixup", "0.4", "--meta_learning"], ["--meta_learning is short for --mixup meta"]),
        (["--mixup", "-1"], ["--mixup", "above 0"]),
        (["--mixup", "nan"], ["--mixup"]),
        (["--mixup", "1000"], ["--mixup", "up to 100"]),
        (["--mixup", "some"], ["--mixup", "none, fixed, meta"]),
        (["--mixup", "1", "--mixup_off_epoch", "5", "--epochs", "5"], ["--mixup_off_epoch 5"]),
        (["--mixup", "1", "--mixup_block", "48"], ["--batch_size 128", "--mixup_block 48"]),
    ],
)
def test_mixup_is_refused(argv, parts):
    text = refused(*argv)
    assert all(part in text for part in parts), text


def test_mixup_of_a_run_is_kept(make_run):
    run = make_run("--mixup", "0.4")
    again = settings_of("--resume", run, "--mixup", "0.4")
    assert (again.mixup, again.alpha, again.mixup_mode) == ("fixed", 0.4, "batch")
    for flags in (["--mixup", "0.3"], ["--mixup", "meta"], ["--cutmix", "1"]):
        assert "a resumed run must keep it" in refused("--resume", run, *flags)
    assert settings_of("--resume", run, "--log_clean_accuracy").log_clean_accuracy


def test_nothing_to_unfreeze():
    assert "without --freeze_backbone" in refused("--unfreeze_epoch", "3")


# ---- resume -------------------------------------------------------------------------------------


def test_bare_resume_takes_the_newest_run_and_its_settings(make_run):
    run = make_run("--epochs", 7, "--width", 16)
    for argv in (["--resume"], ["-r"], ["--resume", run], ["--resume", "--output", run]):
        settings, origin = parse(Settings, [*map(str, argv)], "")
        assert (settings.epochs, settings.width) == (7, 16)
        assert origin["epochs"] == COMMAND_LINE  # where the run itself had it from
        assert (run.parent / settings.resume).resolve() == (run.parent / settings.output).resolve()


def test_bare_resume_in_yaml(make_run, write):
    run = make_run("--width", 16)
    settings = settings_of("--config", write("resume: true"))
    assert settings.width == 16 and settings.output == settings.resume
    assert run.samefile(settings.resume)


def test_resume_from_a_checkpoint_of_the_run(make_run):
    run = make_run("--width", 16)
    step = run / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    settings = settings_of("--resume", step)
    assert (settings.width, settings.resume, settings.output) == (16, str(step), str(run))


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_resumed_run_may_change(name, make_run, write):
    run, value = make_run(*NEEDS.get(name, [])), another_value(name)
    free = FIELDS[name].metadata["resume"] == "free"
    again = [flag for flag in NEEDS.get(name, []) if flag == "--distributed"]  # of one start
    for given in (flags_for(name, value), ["--config", write({name: value})]):
        if free:
            assert getattr(settings_of("--resume", run, *again, *given), name) == value
        else:
            text = refused("--resume", run, *given)
            assert text.startswith(f"--{name} {value}: the run in {run} was started with")


def test_what_must_never_change_is_fixed():
    fixed = {name for name in FIELDS if FIELDS[name].metadata["resume"] != "free"}
    assert fixed >= {
        *("depth", "width", "stem", "dataset", "image_size", "subset", "val_fraction", "seed"),
        *("batch_size", "accumulation_steps", "optimizer", "precision", "crop_padding", "hflip"),
    }
    assert not fixed & {"epochs", "save_every", "output", "workers", "checkpoint_hist", "data_dir"}


def test_settings_of_the_run_may_be_repeated(make_run):
    run = make_run("--optimizer", "adamw", "--width", 16)
    assert settings_of("--resume", run, "--optimizer", "adamw", "--width", 16).width == 16


def test_resume_of_what_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refused("--resume", "nowhere")
    assert "no config.yaml" in refused("--resume", tmp_path)
    assert "no run of resnet50_test.py" in refused("--resume")
    assert "holds no run" in refused("--resume", "--output", tmp_path)


# ---- help, and the entry as a user meets it -----------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_documented(name):
    meta = FIELDS[name].metadata
    assert meta["help"] and meta["group"] and not meta["help"].endswith(".")
    assert meta["resume"] in ("fixed", "free", "evaluation")
    if FIELDS[name].type in (int, float, int | None, float | None) and not meta["choices"]:
        assert any(meta[end] is not None for end in ("low", "above", "high", "below"))


def test_help_lists_everything_without_importing_torch(run_entry_script):
    result = run_entry_script(["--help"], env={"PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "100"})
    assert result.returncode == 0
    assert "utils.settings.config" in result.stderr and "torch" not in result.stderr
    # One entry a setting, each with its default, up to where the next one begins.
    entries = ("\n" + result.stdout).split("\n  --")
    for name in FIELDS:
        [entry] = [e for e in entries if e.split()[0].rstrip(",") == name]
        assert "default: " in " ".join(entry.split()), name
    for heading in {field.metadata["group"] for field in FIELDS.values()}:
        assert f"\n{heading}:\n" in result.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["--epocs", "3"],
        ["--epochs", "0"],
        ["--optimizer", "adam"],
        ["--config", "nowhere.yaml"],
        ["--config", "unknown_key.yaml"],
        ["--config", "two\nlines.yaml"],
        ["--optimizer", "adamw", "--momentum", "0.9"],
        ["--ngd", "--optimizer", "sgd"],
        ["--resume"],
        ["--dataset", "shapes", "--crop_padding", "32"],  # found after the data is there
        pytest.param(
            ["--device", "cuda"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda argv: " ".join(argv).replace("\n", " "),
)
def test_users_mistake_is_one_line_and_exit_code_2(argv, tmp_path, monkeypatch, capfd):
    """In a process of its own: tests/end_to_end/test_faults.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process stay
    (tmp_path / "unknown_key.yaml").write_text("epocs: 3\n")
    files = sorted(tmp_path.iterdir())
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert [p for p in tmp_path.rglob("*") if p.name != "runs"] == files  # no folder is left over


def test_meta_exact_is_refused_with_batchnorm_over_all_processes():
    text = refused("--distributed", "--sync_bn", "--meta_learning", "--meta_exact")
    assert "--meta_exact" in text and "--sync_bn" in text
