"""Flags: both spellings, booleans, ranges, defaults, and what to do about a mistake."""

import dataclasses

import pytest
from settings_of_pictures import (
    FIELDS,
    NEEDS,
    OTHERS,
    another_value,
    flags_for,
    refused,
    settings_of,
)

from utils.optim.table import OPTIMIZERS


@pytest.mark.parametrize("name", OTHERS)
def test_a_flag_has_two_spellings(name):
    value, needs = another_value(name), NEEDS.get(name, [])
    flag, text = flags_for(name, value)
    hyphens = flag.replace("_", "-")
    for argv in ([flag, text], [f"{hyphens}={text}"]):
        result = getattr(settings_of(*needs, *argv), name)
        assert result == value and type(result) is type(value)


@pytest.mark.parametrize("name", ["weight_decay", "label_smoothing"])
def test_either_spelling_takes_its_value_in_two_ways(name):
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        for argv in ([flag, "0.5"], [f"{flag}=0.5"]):
            assert float(getattr(settings_of(*argv), name)) == 0.5


def test_one_letter_flags_take_their_value_attached():
    assert settings_of("-b64").batch_size == 64


BOOLEANS = [n for n in OTHERS if FIELDS[n].type in (bool, bool | None)]


@pytest.mark.parametrize("name", BOOLEANS)
def test_a_boolean_is_a_flag_with_an_opposite(name):
    for flag, expected in ((f"--{name}", True), (f"--no_{name}", False)):
        assert getattr(settings_of(*NEEDS.get(name, []), flag), name) is expected


@pytest.mark.parametrize("name", BOOLEANS[::7])
def test_booleans_are_flags_or_take_a_word(name):
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
    """It takes a bool's values, too: it was one, as in older recipes and settings of runs."""

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


@pytest.mark.parametrize("flag", ["--epo", "--batch", "--optimi", "--learning", "--no_epochs"])
def test_abbreviations_are_refused(flag):
    assert f"unknown flag {flag}" in refused(flag, "3")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--epocs", "3"], ["--epocs", "did you mean --epochs?"]),
        (["--weight-decy", "0"], ["--weight-decy", "did you mean --weight_decay?"]),
        (["--smoothin", "0"], ["did you mean --label_smoothing?"]),  # by way of an alias
        (["--qqqq"], ["unknown flag --qqqq"]),
        (
            ["--lrr", "1", "--patience", "3", "--qqqq"],
            [
                "unknown flags --lrr, did you mean --lr?; --qqqq; ",
                "; --patience 3: --early_stop_patience 10",
                "; see --help",
            ],
        ),
        (["--class_weights", "x"], ["balanced, sqrt, or a .yaml"]),
        (["--class_weights", "w.csv"], ["balanced, sqrt, or a .yaml"]),
        (["--val-split", "x"], ["--val_fraction 0.1 holds out"]),
        (["--crops", "x"], ["unknown flag --crops, did you mean --crop?"]),
        (
            ["--drop", "0.1"],
            ["unknown flag --drop: it belongs to vit_test.py"],
        ),  # vit_test.py has it
        (["--train_files", "x"], ["unknown flag --train_files; see --help"]),  # nothing is near it
        (["resnet18"], ["'resnet18': there is no such folder", "may be the data folder"]),
        (["--epochs", "1", "resnet18"], ["'resnet18' has no flag before it"]),
        ([".", "resnet18"], ["'resnet18' has no flag before it"]),
        ([".", "--data_dir", "x"], [".: the data folder is given twice", "--data_dir"]),
        ([".", "--data-path=x"], [".: the data folder is given twice"]),
        (["--opt_level", "O3"], ["--opt_level O3: weights in fp16"]),  # the flag that was typed
        (["--opt_level=O3"], ["--opt_level O3: weights in fp16"]),
        (["-b", "x"], ["-b: 'x' is not a whole number"]),
        (["-b", "8", "--batch_size", "x"], ["--batch_size: 'x' is not a whole number"]),
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
        (["--ngd", "--ngd_eta", "1.5"], ["--ngd_eta", "above 0 and up to 1"]),
        (["--ngd", "--ngd_axes", "rows"], ["--ngd_axes", "one of patch, kernel, all, channels"]),
        (["--lookahead_k", "0"], ["--lookahead_k", "1 or more"]),
        (["--ngd", "--ngd_norm", "unit"], ["--ngd_norm", "one of fixed, gradient"]),
        (["--optimizer", "adamw", "--betas", "0.9"], ["--betas 0.9: two numbers", "0.9,0.999"]),
        (["--optimizer", "adamw", "--betas", "0.9", "1"], ["--betas 0.9,1: two numbers"]),
        (["--warmup_epochs", "1", "--warmup_lr", "1"], ["--warmup_lr 1.0 is above --lr 0.1"]),
        (["--resume-from-epoch", "3"], ["unknown flag --resume-from-epoch 3: ", "--epochs counts"]),
        (["--optimizer", "adamw", "--beta1", "high"], ["--beta1 high: a number is needed"]),
        (["--optimizer", "adamw", "--beta2", "1"], ["--betas 0.9,1: two numbers"]),
        (["--beta1", "0.8", "--betas", "0.9,0.99"], ["--beta1 0.8 is a part of --betas"]),
        (["--num-classes", "10"], ["unknown flag --num-classes 10: it follows from the data"]),
        (["--model", "vgg11"], ["unknown flag --model vgg11: vit_test.py has"]),
        (["--kfac-damping", "0.1"], ["--ngd_alpha is the damping"]),
        (["--avg-m", "1"], ["unknown flag --avg-m 1: ", "--optimizer_average"]),
        (["--seed", 2**32], ["--seed", "up to"]),
        (["--depth", "20"], ["--depth", "18, 34, 50, 101, 152"]),
        (["--optimizer", "adamv"], ["--optimizer", "did you mean adamw?"]),
        (["--batch_size", "none"], ["--batch_size", "a whole number"]),
        (["--subset", "1.5"], ["--subset 1.5", "whole number"]),
        (["--save_every", "soon"], ["--save_every soon", "10m"]),
        (["--save_every", "0"], ["--save_every 0"]),
        (["--save_every", "-5m"], ["--save_every"]),
        (["--warmup_epochs", "3", "--epochs", "2"], ["--warmup_epochs", "--epochs 2"]),
        (["--eval_only"], ["--eval_only", "--resume"]),
        (["--eval_data", "x"], ["--eval_data needs", "by --resume RUN"]),
        (["--eval_data", "x", "--pretrained", "y"], ["--eval_data needs", "by --resume RUN"]),
        (["--eval_data", "x", "--predict", "y"], ["--eval_only and --predict", "only one"]),
        (["--predict", "x"], ["--predict", "--resume RUN"]),
        (["--export", "onnx"], ["--export", "--resume RUN"]),
        (["--export", "onnx", "--eval_only"], ["--eval_only and --export", "only one of them"]),
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
        (["--config", "vit-b16.py"], ["a recipe is a YAML file", "vit_b16_imagenet.yaml"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["--config", "."], ["--config", "Is a directory"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_wrong_flag_is_named_with_advice(argv, parts):
    text = refused(*argv)
    assert [part for part in parts if part not in text] == []


def test_defaults_may_depend_on_other_settings():
    assert (settings_of().lr, settings_of().weight_decay) == (0.1, 5e-4)
    adamw = settings_of("--optimizer", "adamw")
    assert (adamw.lr, adamw.weight_decay) == (1e-3, 0.05)
    assert settings_of("--optimizer", "adamw", "--lr", "0.5").lr == 0.5
    ngd = settings_of("--ngd", "--ngd_norm", "gradient")  # as sgd, since it steps like sgd
    assert (ngd.lr, ngd.weight_decay, ngd.momentum) == (0.1, 5e-4, 0.9)
    assert settings_of("--ngd").lr == OPTIMIZERS["ngd"].lr < 0.1
    momenta = {name: settings_of("--optimizer", name).momentum for name in OPTIMIZERS}
    assert momenta == {
        "sgd": 0.9, "adamw": None, "lamb": None, "muon": 0.95, "madgrad": 0.9, "ngd": 0.9,
        "fusedadam": None, "fusedlamb": None, "fusedsgd": 0.9, "fusednovograd": None,
    }  # fmt: skip


def test_a_strategy_that_divides_parameters_takes_what_can_step_parts_of_them(monkeypatch):
    flags = "--distributed", "--strategy", "fsdp", "--optimizer", "muon"
    assert settings_of(*flags).optimizer == "muon"
    alone = dataclasses.replace(OPTIMIZERS["muon"], takes_exchange=False)
    monkeypatch.setitem(OPTIMIZERS, "muon", alone)
    assert "needs whole matrices" in refused(*flags)


@pytest.mark.parametrize("argv", [["--lr", ""], ["--resume="], ["--predict", ""], ["--data_dir="]])
def test_an_empty_value_is_refused(argv):
    """It is what a script has for a variable that is not set."""
    assert "the value is empty" in refused(*argv)


def test_a_home_folder_is_found_where_the_shell_leaves_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert settings_of("--output=~/run").output == "/home/me/run"
    assert settings_of("--output=a~/run").output == "a~/run"


def test_flags_of_a_part_or_in_short_leave_the_rest_to_the_recipe(write):
    recipe = write("optimizer: adamw\nbetas: 0.8,0.98\nema_decay: 0.99\nprecision: bf16\n")
    settings = settings_of("--config", recipe, "--beta2", 0.95, "--model_ema", "--amp")
    assert (settings.betas, settings.ema_decay) == ("0.8,0.95", 0.99)
    assert settings.precision == "bf16"


def test_a_flag_replaces_what_a_recipe_has_in_its_place(write):
    recipe = write("warmup_steps: 10000\nglobal_batch: 4096\n")
    settings = settings_of("--config", recipe, "--warmup_epochs", 1, "--accumulation_steps", 2)
    assert (settings.warmup_epochs, settings.warmup_steps) == (1, None)
    assert (settings.accumulation_steps, settings.global_batch) == (2, None)
