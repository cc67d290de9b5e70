"""Space files and flags of a search: read, checked, refused in one line."""

import dataclasses
from types import SimpleNamespace

import optuna
import pytest
from small_spaces import RESNET50, TRANSFORMER, space_of, tuned

import resnet50_test
import transformer_test
from tuning.entry import Target, main
from tuning.flags import READ_AS, REFUSED, for_trials, seconds
from utils.errors import UserError
from utils.optim.table import OPTIMIZERS
from utils.settings.aliases import ALIASES
from utils.settings.config import fields


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], {"lr", "momentum", "weight_decay", "warmup_epochs", "label_smoothing"}),
        (["--lr", "0.2", "--sched", "step", "--mixup", "fixed"],
         {"momentum", "weight_decay", "warmup_epochs", "label_smoothing", "alpha", "gamma"}),
        (["--optimizer", "adamw"], {"lr", "weight_decay", "warmup_epochs", "label_smoothing"}),
        (["--ngd", "--sched", "onecycle"], {"lr", "momentum", "weight_decay", "label_smoothing",
                                            "ngd_alpha", "ngd_eta", "ngd_update_period"}),
        (["--params", "lr,momentum"], {"lr", "momentum"}),
    ],
)  # fmt: skip
def test_parameters_of_the_space_for_pictures(flags, names):
    space, _, notes = space_of(RESNET50.space, *flags)
    assert set(tuned(space)) == names
    assert not any("widened" in note for note in notes)
    if "--lr" in flags:
        assert any("fixed by the command line" in note and "lr 0.2" in note for note in notes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("target", [RESNET50, TRANSFORMER])
def test_shipped_spaces_contain_every_default(target, optimizer):
    """So the first trial can be the default recipe, with any optimizer and either norm of ngd."""
    for more in ([], ["--ngd_norm", "gradient"] if optimizer == "ngd" else []):
        space, raw, notes = space_of(target.space, "--optimizer", optimizer, *more, target=target)
        assert not notes or all(note.startswith("fixed") for note in notes)
        base = target.settings_class(
            **{n: f.default for n, f in fields(target.settings_class).items()} | raw
        )
        base.validate()
        values = tuned(space)
        assert values["warmup_epochs"] == 0
        for name in set(values) - {"warmup_epochs"}:
            assert values[name] == getattr(base, name)
        assert all(parameter.grid for parameter in space.parameters)
        if optimizer in ("adamw", "sgd") and target is RESNET50:  # of others: 40,000 points
            assert space.grid()


def test_a_value_of_the_recipe_is_the_default(space_file, tmp_path):
    recipe = tmp_path / "base.yaml"
    recipe.write_text("lr: 2.0\nwarmup_epochs: 5\nlabel_smoothing: 0.1\n")
    path = space_file(
        "lr: {low: 0.01, high: 1.0, scale: log, default: 0.3}\n"
        "momentum: {low: 0.8, high: 0.95, default: 0.85}\n"
        "warmup_epochs: {low: 0, high: 0.3, of: epochs}\n"
    )
    space, raw, notes = space_of(path, "--config", str(recipe))
    assert tuned(space) == {"lr": 2.0, "momentum": 0.85, "warmup_epochs": 0.1}
    assert raw["momentum"] == 0.85 and raw["label_smoothing"] == 0.1
    assert any("widened to 0.01 to 2" in note for note in notes)


def test_conditions_hold_by_tuned_values(space_file):
    path = space_file(
        "optimizer: {choices: [sgd, adamw]}\n"
        "lr:\n"
        "  - {when: {optimizer: sgd}, low: 0.1, high: 1.0, scale: log}\n"
        "  - {when: {optimizer: adamw}, low: 0.0001, high: 0.01, scale: log, default: 0.002}\n"
        "momentum: {low: 0.8, high: 0.95}\n"
    )
    space, _, _ = space_of(path)
    found = {}

    def objective(trial):
        values = space.suggest(trial)
        found.setdefault(values["optimizer"], []).append(values)
        return 0.0

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=20)
    assert all(0.1 <= v["lr"] <= 1 and "momentum" in v for v in found["sgd"])
    assert all(v["lr"] <= 0.01 and "momentum" not in v for v in found["adamw"])


def ranges_of(space):
    found = {}
    space.propose(lambda one: found.setdefault(one.name, (one.low, one.high)) and one.default)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranges_are_those_that_the_optimizer_states(space_file, optimizer):
    path = space_file(
        "lr:\n"
        "  - {when: {optimizer: muon}, low: 0.0001, high: 0.5, scale: log}\n"
        "  - {of: optimizer}\n"
        "wd: {of: optimizer}\n"
        "optimizer_flags: {of: optimizer}\n"
    )
    space, _, _ = space_of(path, "--optimizer", optimizer)
    entry = OPTIMIZERS[optimizer]
    stated = {name: (one[0].low, one[0].high) for name, one in entry.ranges.items()}
    if optimizer == "muon":  # earlier parameters come first
        stated["lr"] = (0.0001, 0.5)
    assert ranges_of(space) == stated
    assert [one.key for one in space.parameters if one.name == "lr"] == ["lr"]


def test_the_ranges_of_ngd_depend_on_its_norm():
    for norm, other in (("gradient", "sgd"), ("fixed", "ngd")):
        path = RESNET50.space
        space, _, _ = space_of(path, "--ngd", "--ngd_norm", norm)
        one = OPTIMIZERS[other].ranges["lr"][0]
        assert ranges_of(space)["lr"] == (one.low, one.high)


def test_an_optimizer_that_is_tuned_brings_its_own_ranges(space_file):
    path = space_file(
        "optimizer: {choices: [sgd, adamw]}\nlr: {of: optimizer}\nweight_decay: {of: optimizer}\n"
    )
    space, _, _ = space_of(path)
    keys = {one.key for one in space.parameters}
    assert {"lr.1", "lr.2", "weight_decay.1", "weight_decay.2"} < keys


def test_proposed_numbers_are_rounded_and_whole_where_needed(space_file):
    path = space_file(
        "lr: {low: 0.0001, high: 1.0, scale: log}\nlayers: {low: 1, high: 8, scale: int}\n"
        "lookahead_k: {choices: [null, 5, 10]}\n"
    )
    space, _, _ = space_of(path, target=TRANSFORMER)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        values = space.suggest(study.ask())
        assert float(f"{values['lr']:.4g}") == values["lr"] and 0.0001 <= values["lr"] <= 1
        assert isinstance(values["layers"], int) and values["lookahead_k"] in (None, 5, 10)


BAD = {
    "lrr: {low: 0.1, high: 1}": "unknown setting 'lrr', did you mean lr?",
    "lr: 0.1": "low, high and scale, or choices, are needed",
    "lr: {low: 0.1}": "high is missing",
    "lr: {low: 1, high: 0.1}": "low 1 is not below high 0.1",
    "lr: {low: -1, high: 1}": "lr: low: -1 is not a number above 0",
    "lr: {low: 0.1, high: 1, scale: cubic}": "scale 'cubic' is not one of",
    "label_smoothing: {low: 0, high: 0.2, scale: log}": "scale log needs low above 0",
    "lr: {lo: 0.1, high: 1}": "unknown key 'lo', did you mean low?",
    "lr: {low: x, high: 1}": "low: 'x' is not a number",
    "momentum: {low: 0.5, high: 1.5}": "high: 1.5 is not a number of 0 or more and below 1",
    "lr: {choices: [0.1]}": "choices is a list of two or more",
    "lr: {choices: [0.1, 0.2], low: 0.1}": "without low, high, scale",
    "sched: {low: 0.1, high: 1}": "sched: low",
    "lr: {low: 0.1, high: 1, grid: 3}": "grid: a list",
    "lr: {low: 0.1, high: 1, grid: [2]}": "grid point 2 lies outside",
    "lr: {low: 0.1, high: 1, when: {optimiser: sgd}}": "unknown setting 'optimiser', did you mean",
    "lr: {low: 0.1, high: 1, when: {optimizer: sdg}}": "did you mean sgd?",
    "lr: {low: 0.1, high: 1, when: sgd}": "when: 'setting: value' is needed",
    "warmup_epochs: {low: 0, high: 3, of: epochs}": "is not a fraction of the epochs",
    "warmup_epochs: {low: 0, high: 3, of: steps}": "of: 'steps' is not epochs",
    "clip: {of: optimizer}": "no optimizer states a range",
    "clip: {low: 0.1, high: 10, scale: log}": "the recipe has None",
    "layers: {low: 1.5, high: 3, scale: int}": "1.5",
    "[1, 2]": "'setting:' lines are needed",
    "": "'setting:' lines are needed",
    "lr: {low: 0.1": "is not valid YAML",
    "alpha: {low: 0.1, high: 1}": "nothing is left to tune",
    "epochs: {low: 1, high: 9}": "epochs cannot be tuned: the stages decide on the epochs",
    "seed: {low: 0, high: 9}": "seed cannot be tuned: it would find a lucky seed",
    "val-fraction: {low: 0.1, high: 0.2}": "trials are compared on the same data",
    "eval_every: {low: 1, high: 9}": "a search decides when trials are evaluated",
    "max_steps: {low: 1, high: 9}": "the length of a trial is --epochs",
    "workers: {low: 1, high: 9}": "it is no part of the resulting recipe",
}


@pytest.mark.parametrize("text", BAD)
def test_mistakes_in_a_space_are_named(space_file, text):
    path = space_file(text)
    with pytest.raises(UserError) as error:
        space_of(path, target=TRANSFORMER if "layers" in text else RESNET50)
    assert BAD[text] in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value) or "--params" in str(error.value)


FLAGS = {
    ("--space", "nowhere.yaml"): "--space nowhere.yaml: No such file",
    ("--trials", "0"): "--trials: '0' is not a whole number of 1 or more",
    ("--timeout", "soon"): "--timeout soon: a time such as",
    ("--sampler", "best"): "--sampler: 'best' is not one of",
    ("--trails", "3"): "did you mean --trials?",
    ("--resume",): "the same command continues",
    ("--max_steps", "3"): "--max_steps cannot be used in a search",
    ("--params", "lr,gamma"): "--params gamma: --sched cosine does not use it",
    ("--params", "depth"): "--params: depth is not in",
    ("--params", "lr", "--lr", "0.1"): "--lr is given, so it is fixed",
    ("--subset", "1.5"): "--subset 1.5",
    ("--lr", "-1"): "--lr: '-1' is not a number above 0",
    ("--test_fraction", "0.5"): "--test_fraction has no effect",
    ("--warmup_epochs", "60"): "--warmup_epochs 60.0 is longer than --epochs 50",
    ("--sampler", "grid"): "warmup_epochs has no grid points",
    ("--output", "/proc/nowhere"): "/proc/nowhere",
}


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_mistakes_in_flags_are_named(refuse, flags):
    assert FLAGS[flags] in refuse(*flags)


def test_words_that_are_about_the_trials():
    assert for_trials(["--epochs", "3", "--subset=0.1", "--val-fraction", "0.1", "--bs", "8"]) == [
        "--trial_epochs", "3", "--trial_subset=0.1", "--trial_val_fraction", "0.1", "--bs", "8",
    ]  # fmt: skip
    for alias, name in ALIASES.items():
        assert READ_AS.get(alias) == READ_AS.get(name)


@pytest.mark.parametrize(("name", "target"), [("resnet50", RESNET50), ("transformer", TRANSFORMER)])
def test_help_lists_the_flags_as_a_search_reads_them(name, target, capsys):
    assert main([name, "--ngd", "--help", "all"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: bash tuning/{name}_tuning.sh [--flag value ...]\n")
    help_of = {entry.split()[0]: " ".join(entry.split()) for entry in told.split("\n  --")[1:]}
    assert "a trial's last stage" in help_of["epochs"]
    assert "default: 50" not in help_of["epochs"]
    whole = fields(target.settings_class)["epochs"].default
    assert f"those of --config, else {whole}" in help_of["recipe_epochs"]
    assert help_of.keys().isdisjoint({*REFUSED, "trial_epochs", "trial_subset", "predictions"})
    first = told.split("\noptimization:")[0]
    assert all(f"\n  --{flag} " in first for flag in ("epochs", "subset", "recipe_epochs"))
    assert for_trials(["--recipe-epochs", "90"]) == ["--epochs", "90"]
    assert [seconds(text) for text in ("90s", "30m", "2h", "45", None)] == [
        90,
        1800,
        7200,
        45,
        None,
    ]


def test_flags_of_a_search_differ_from_those_of_entries():
    for entry in (resnet50_test, transformer_test):
        own = {field.name for field in dataclasses.fields(entry.Settings)}
        assert not own & {"trials", "timeout", "jobs", "sampler", "space", "confirm"}


def test_the_range_of_ngds_damping_depends_on_its_power():
    for flags, low in (
        ([], 1e-3),
        (["--ngd_power", "1"], 0.5),
        (["--ngd_norm", "gradient"], 0.5),
        (["--ngd_norm", "gradient", "--ngd_power", "0.5"], 1e-3),
    ):
        space, _, _ = space_of(RESNET50.space, "--ngd", *flags)
        assert [one.low for one in space.parameters if one.name == "ngd_alpha"] == [low]


@pytest.mark.parametrize("argv", [[], ["resnet"], ["--help"]])
def test_a_name_that_is_not_an_entry_is_a_line(argv, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "resnet50, transformer, vit" in error


def test_the_description_of_a_search():
    assert RESNET50.description.startswith("Searches settings for a ResNet on pictures: ")
    for doc in (None, "", "Fits a model."):
        entry = SimpleNamespace(
            Settings=resnet50_test.Settings, model_name=None, __file__="/a/one_test.py", __doc__=doc
        )
        assert Target(entry, None).description == "Searches settings for one_test.py."
