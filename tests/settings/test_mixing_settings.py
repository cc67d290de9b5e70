"""Settings of mixup: a number or a word, and what is refused."""

import itertools
from pathlib import Path

import pytest
from settings_of_pictures import refused, settings_of

import transformer_test
from utils.settings.config import parse


@pytest.mark.parametrize(
    ("argv", "mixup", "alpha", "mixing"),
    [
        (["--mixup", "0.4"], "fixed", 0.4, "fixed"),
        (["--mixup-alpha", "0.4"], "fixed", 0.4, "fixed"),
        (["--mixup", "0"], "none", 0.2, "none"),
        (["--mixup", "0", "--cutmix", "1.0"], "none", 0.2, "cutmix"),
        (["--mixup", "0.4", "--alpha", "0.4"], "fixed", 0.4, "fixed"),
        (["--mixup", "auto"], "auto", 0.2, "auto"),
        (["--mixup", "auto", "--cutmix", "1"], "auto", 0.2, "auto, cutmix"),
        (["--meta_learning"], "meta", 0.2, "meta"),
        (["--meta-learning", "--alpha", "0.5", "--cutmix-alpha", "1"], "meta", 0.5, "meta, cutmix"),
    ],
)
def test_mixup_takes_a_number_or_a_word(argv, mixup, alpha, mixing, write):
    in_file, words = {}, [*argv, "end"]
    for word, value in itertools.pairwise(words):
        if word.startswith("--"):
            given = True if value.startswith("--") or value == "end" else value
            in_file[word[2:]] = float(value) if value[0].isdigit() else given
    for settings in (settings_of(*argv), settings_of("--config", write(in_file))):
        assert (settings.mixup, settings.alpha, settings.mixing_name) == (mixup, alpha, mixing)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--mixup", "0.4", "--alpha", "0.3"],
            ["--mixup 0.4 is short for --mixup fixed --alpha 0.4", "0.3"],
        ),
        (["--mixup", "0.4", "--meta_learning"], ["--meta_learning is short for --mixup meta"]),
        (["--mixup", "-1"], ["--mixup", "above 0"]),
        (["--mixup", "nan"], ["--mixup"]),
        (["--mixup", "1000"], ["--mixup", "up to 100"]),
        (["--mixup", "some"], ["--mixup", "none, fixed, auto, meta"]),
        (["--mixup", "1", "--mixup_off_epoch", "5", "--epochs", "5"], ["--mixup_off_epoch 5"]),
        (["--mixup", "1", "--mixup_block", "48"], ["--batch_size 128", "--mixup_block 48"]),
        (
            ["--mixup", "1", "--bs", "1", "--accumulation_steps", "8"],
            ["needs a partner in its micro-batch", "--batch_size 2 or more"],
        ),
        (["--cutmix", "1", "--bs", "1", "--auto_batch"], ["--batch_size 2 or more"]),
    ],
)
def test_contradictions_with_mixup_are_refused(argv, parts):
    text = refused(*argv)
    assert all(part in text for part in parts), text


def test_batches_of_one_sample_where_nothing_is_mixed(make_run):
    assert settings_of("--bs", "1").batch_size == 1
    evaluated = ["--resume", make_run("--mixup", "1", "--mixup_block", "32"), "--eval_only"]
    assert settings_of(*evaluated, "--bs", "1").batch_size == 1
    argv = ["--mixup", "1", "--batch_tokens", "200", "--bs", "1"]
    assert parse(transformer_test.Settings, argv, "")[0].batch_tokens == 200


def test_an_earlier_run_that_mixed_nothing_can_be_resumed(make_run):
    run = make_run("--mixup", "1")
    path = Path(run) / "config.yaml"
    path.write_text(path.read_text().replace("batch_size: 128", "batch_size: 1"))
    assert settings_of("--resume", run).batch_size == 1


def test_a_resumed_run_keeps_its_mixup(make_run):
    run = make_run("--mixup", "0.4")
    again = settings_of("--resume", run, "--mixup", "0.4")
    assert (again.mixup, again.alpha, again.mixup_mode) == ("fixed", 0.4, "batch")
    for flags in (["--mixup", "0.3"], ["--mixup", "meta"], ["--cutmix", "1"]):
        assert "a resumed run must keep it" in refused("--resume", run, *flags)
    assert settings_of("--resume", run, "--log_clean_accuracy").log_clean_accuracy


def test_meta_exact_is_refused_with_batchnorm_over_all_processes():
    text = refused("--distributed", "--sync_bn", "--meta_learning", "--meta_exact")
    assert "--meta_exact" in text and "--sync_bn" in text
