"""Settings that a resumed run takes over, and those that it may change."""

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

from resnet50_test import Settings
from utils.settings import TextSettings
from utils.settings.config import COMMAND_LINE, parse, to_yaml


def test_resume_without_a_name_takes_the_newest_run_and_its_settings(make_run):
    run = make_run("--epochs", 7, "--width", 16)
    for argv in (["--resume"], ["-r"], ["--resume", run], ["--resume", "--output", run]):
        settings, origin = parse(Settings, [*map(str, argv)], "")
        assert (settings.epochs, settings.width) == (7, 16)
        assert origin["epochs"] == COMMAND_LINE  # where the run had it from
        assert (run.parent / settings.resume).resolve() == (run.parent / settings.output).resolve()


def test_resume_without_a_name_may_stand_in_yaml(make_run, write):
    run = make_run("--width", 16)
    settings = settings_of("--config", write("resume: true"))
    assert settings.width == 16 and settings.output == settings.resume
    assert run.samefile(settings.resume)


@pytest.mark.parametrize(("came", "kept"), [("default", True), ("command line", False)])
def test_an_earlier_run_has_the_report_unless_it_was_switched_off(came, kept, make_run):
    """It was off by default."""
    config = make_run("--no_report") / "config.yaml"
    line = "report: false  # "
    config.write_text(config.read_text().replace(f"{line}command line", f"{line}{came}"))
    assert settings_of("--resume", config.parent).report is kept


def test_resume_may_name_a_checkpoint_of_the_run(make_run):
    run = make_run("--width", 16)
    step = run / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    settings = settings_of("--resume", step)
    assert (settings.width, settings.resume, settings.output) == (16, str(step), str(run))


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_a_resumed_run_may_change(name, make_run, write):
    run, value = make_run(*NEEDS.get(name, [])), another_value(name)
    free = FIELDS[name].metadata["resume"] == "free"
    # Never saved; without it some have no effect, and are not looked at.
    again = [flag for flag in NEEDS.get(name, []) if flag == "--distributed"]
    for given in (flags_for(name, value), ["--config", write({name: value})]):
        if free:
            assert getattr(settings_of("--resume", run, *again, *given), name) == value
        else:
            text = refused("--resume", run, *again, *given)
            assert text.startswith(f"--{name} {value}: the run in {run} was started with")


def test_settings_that_must_never_change_are_fixed():
    fixed = {name for name in FIELDS if FIELDS[name].metadata["resume"] != "free"}
    assert fixed >= {
        *("depth", "width", "stem", "dataset", "image_size", "subset", "val_fraction", "seed"),
        *("batch_size", "accumulation_steps", "optimizer", "precision", "crop_padding", "hflip"),
    }
    assert not fixed & {"epochs", "save_every", "output", "workers", "checkpoint_hist", "data_dir"}


def test_a_run_older_than_a_setting_keeps_to_what_it_did(make_run):
    run = make_run("--ngd", "--ngd_alpha", 4)
    path = run / "config.yaml"
    newer = ("ngd_power", "ngd_momentum_first", "ngd_adam", "ngd_axes")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith(newer)))
    settings = settings_of("--resume", run)
    assert [getattr(settings, name) for name in newer] == [1.0, False, False, "all"]
    assert "--ngd_power 0.5: the run in" in refused("--resume", run, "--ngd_power", 0.5)
    assert settings_of("--ngd").ngd_power == 0.5


def test_a_transformer_older_than_orthogonal_steps_keeps_to_what_it_did(tmp_path):
    (tmp_path / "config.yaml").write_text("optimizer: ngd\nlr: 0.004\nmomentum: 0.9\n")
    resumed, _ = parse(TextSettings, ["--resume", str(tmp_path)], "")
    new, _ = parse(TextSettings, ["--ngd"], "")
    own = ("ngd_orthogonal", "adam_lr_scale", "momentum")
    assert [getattr(resumed, name) for name in own] == [False, 1.0, 0.9]
    assert [getattr(new, name) for name in own] == [True, 0.4, 0.9]


def test_a_run_older_than_zero_initialised_branches_keeps_its_start(make_run, write):
    """A flag that was off by default, and in the oldest runs did not exist."""
    run = make_run()
    path, text = run / "config.yaml", (run / "config.yaml").read_text()
    line = "zero_init_residual: true  # default\n"
    assert line in text and settings_of("--resume", run).zero_init_residual
    for older in (text.replace(line, ""), text.replace(line, line.replace("true", "false"))):
        path.write_text(older)
        assert settings_of("--resume", run).zero_init_residual is False
        assert "was started with False" in refused("--resume", run, "--zero_init_residual")
    assert settings_of("--config", path, "--output", "again").zero_init_residual is False
    assert settings_of("--no-zero-init-residual").zero_init_residual is False
    assert settings_of().zero_init_residual


def test_settings_of_the_run_may_be_repeated(make_run):
    run = make_run("--optimizer", "adamw", "--width", 16)
    assert settings_of("--resume", run, "--optimizer", "adamw", "--width", 16).width == 16


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "adamw", "--momentum", "0.8"],
        ["--accumulation_steps", "4", "--distributed", "--global_batch", "1024"],
        ["--warmup_epochs", "3", "--warmup_steps", "10"],
        ["--config", "recipe.yaml"],
    ],
)
def test_flags_without_effect_may_be_repeated(make_run, write, flags):
    """As by run_distributed.sh, which starts a run that has failed again by the same command."""
    recipe = write("optimizer: adamw\nmomentum: 0.9\nalpha: 0.5\n")
    flags = [recipe if flag == "recipe.yaml" else flag for flag in flags]
    run = make_run(*flags)
    before, after = settings_of(*flags), settings_of("--resume", run, *flags)
    assert (after.momentum, after.warmup_epochs) == (before.momentum, before.warmup_epochs)
    assert after.accumulation_steps == before.accumulation_steps


def test_resume_of_something_else_than_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refused("--resume", "nowhere")
    assert "no config.yaml" in refused("--resume", tmp_path)
    assert "no run of resnet50_test.py" in refused("--resume")
    assert "holds no run" in refused("--resume", "--output", tmp_path)


def test_the_answer_about_a_header_is_that_of_the_training_file_alone(tmp_path):
    """Other tables, which --predict reads, may have none."""
    flags = ["--dataset", "csv", "--train_file", "a.csv", "--test_fraction", "0.2", "--header"]
    (tmp_path / "config.yaml").write_text(to_yaml(*parse(TextSettings, flags, "")))
    resumed = ["--resume", str(tmp_path)]
    for more, header in (
        ([], True),
        (["--eval_only"], True),
        (["--predict", "b.csv"], None),
        (["--predict", "b.csv", "--no_header"], False),
    ):
        assert parse(TextSettings, [*resumed, *more], "")[0].header is header
