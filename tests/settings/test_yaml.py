"""Settings in YAML: mistakes, values, precedence, and config.yaml taken back."""

import dataclasses
from itertools import cycle, islice

import pytest
from settings_of_pictures import FIELDS, KEPT, NEEDS, another_value, flags_for, refused, settings_of

from resnet50_test import Settings
from utils.data.images.sources import IMAGE_DATASETS
from utils.optim.table import OPTIMIZERS
from utils.settings.config import COMMAND_LINE, DEFAULT, FILE, parse, to_yaml


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
        ("wandb_tags: [a, null]", ["wandb_tags", "['a', None] is not a text, a number, or a list"]),
        ("wandb_tags: [[a], b]", ["wandb_tags", "is not a text, a number, or a list of these"]),
        ("milestones: [30, true]", ["milestones", "is not a text, a number, or a list of these"]),
        ("milestones: {30: 60}", ["milestones", "is not a text, a number, or a list of these"]),
        ("mixup: true", ["mixup", "True is not one of none, fixed"]),
        ("output: {a: b}", ["output", "a text"]),
        ("compile: 2", ["compile", "true or false"]),
        ("lr: .inf", ["lr", "above 0"]),
        ("label_smoothing: 1", ["label_smoothing", "below 1"]),
        ("dataset: cifar11", ["dataset", "did you mean cifar10?"]),
        ("resume: false", ["resume"]),
        ("epochs: [1", ["not valid YAML"]),
        ("a: b: c", ["not valid YAML"]),
        ("epochs: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
        ("- epochs\n- 3", ["'name: value' lines are needed"]),
        ("epochs 3", ["'name: value' lines are needed"]),
        ("bs: 3\nbatch_size: 4", ["batch_size is set twice"]),
        ("batch-size: 3\nbatch_size: 4", ["batch_size is set twice"]),
        ("<<: 3", ["not valid YAML"]),
        ("lr: 0.1\nlr: 0.5", ["not valid YAML: lr is there twice", "line 2"]),
        ("batch_size: 1:30", ["batch_size", "'1:30'", "a whole number"]),  # 90 in YAML 1.1
        ("batch_size: 0x10", ["batch_size", "'0x10'", "a whole number"]),
        ("epochs: " + "9" * 5000, ["not valid YAML"]),
        ("epochs: " + "[" * 3000, ["not valid YAML"]),
    ],
    ids=str,
)
def test_wrong_yaml_is_named_with_its_file(content, parts, write):
    path = write(content, "mit Größe.yaml")
    text = refused("--config", path)
    assert [part for part in [str(path), *parts] if part not in text] == []


def test_yaml_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00epochs")
    assert "not valid YAML" in refused("--config", path)


@pytest.mark.parametrize(
    ("content", "name", "value"),
    [
        ("lr: 1e-3", "lr", 1e-3),  # text in YAML 1.1
        ("lr: 1", "lr", 1.0),
        ("depth: 18.0", "depth", 18),
        ("batch_size: 010", "batch_size", 10),  # 8 in YAML 1.1
        ("output: 2024-01-01", "output", "2024-01-01"),  # a date there
        ("output: 2024-02-30", "output", "2024-02-30"),
        ("lr: 2.5e-3", "lr", 2.5e-3),
        ("weight_decay: -0.0", "weight_decay", 0.0),
        ("save_every: 500", "save_every", "500"),
        ("channels-last: off", "channels_last", False),
        ("clip: null", "clip", None),
        ("clip: off", "clip", 0.0),  # as --clip none
        ("mixup: off", "mixup", "none"),
        ("mixup: no", "mixup", "none"),
        ("fused: off", "fused", "none"),
        ("auto_augment: off", "auto_augment", "none"),
        ("wandb: off", "wandb", "disabled"),
        ("sched: multistep\nmilestones: [30, 60.5, '90']", "milestones", "30,60.5,90"),
        ("<<: {epochs: 7, lr: 1}\nlr: 0.5", "epochs", 7),
        ("<<: {epochs: 7, lr: 1}\nlr: 0.5", "lr", 0.5),
        ("# nothing", "epochs", 50),
        ("", "epochs", 50),
    ],
)
def test_yaml_values_become_settings(content, name, value, write):
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
def test_written_settings_are_read_back(name, write):
    """--config takes what a run writes as config.yaml, even defaults without effect."""
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


# Each data set and each optimizer at least once.
NUMBER = max(len(IMAGE_DATASETS), len(OPTIMIZERS))
PAIRS = [*islice(zip(cycle(IMAGE_DATASETS), cycle(OPTIMIZERS), strict=False), NUMBER)]


@pytest.mark.parametrize(("dataset", "optimizer"), PAIRS)
def test_config_of_every_data_set_and_optimizer_is_accepted_again(dataset, optimizer, write):
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
    # The run's folder is recorded in a comment: another run must not take it over.
    assert (again.output, again.data_dir) == (None, text)
