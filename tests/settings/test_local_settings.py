"""Flags of local steps."""

import pytest
from settings_of_pictures import refused, settings_of

from utils.settings.local import OF_LOCAL, RULE_FLAGS


@pytest.mark.parametrize(
    "flags",
    (
        ["--sync_bn", "--distributed"],
        ["--cuda_graphs"],
        ["--lookahead_k", "5"],
        ["--auto_batch"],
        ["--mixup", "meta"],
        ["--mixup", "auto"],
    ),
)
def test_what_cannot_be_combined_is_refused_with_the_reason(flags):
    text = refused("--strategy", "local", *flags)
    assert text.startswith(flags[0]) and "cannot be combined with --strategy local: " in text
    settings_of(*flags)


def test_madgrad_needs_its_sums_averaged():
    local = ("--strategy", "local", "--optimizer", "madgrad")
    assert "add --optimizer_average" in refused(*local)
    assert "diloco" in refused(*local, "--sync_rule", "diloco", "--optimizer_average")
    settings_of(*local, "--optimizer_average")
    settings_of(*local, "--momentum", 0)


def test_the_paper_s_names_work():
    settings = settings_of("--strategy", "local", "--power", 3, "--min-h", 8, "--init-h", 2)
    assert (settings.qsr_power, settings.sync_base, settings.sync_init) == (3, 8, 2)


def test_the_rules_name_their_flags():
    assert set(sum(RULE_FLAGS.values(), ())) < set(OF_LOCAL)
    for rule in RULE_FLAGS:
        settings_of("--strategy", "local", "--sync_rule", rule)


def test_rounds_of_diloco_are_longer_unless_their_length_is_given():
    flags = ["--strategy", "local"]
    assert settings_of(*flags).base_of_rounds == 4
    assert settings_of(*flags, "--sync_rule", "diloco").base_of_rounds == 500
    assert settings_of(*flags, "--sync_rule", "diloco", "--sync_base", 7).base_of_rounds == 7


def test_diloco_has_flags_of_its_own():
    settings = settings_of("--strategy", "local", "--sync_rule", "diloco", "--qsr_alpha", 0.1)
    assert settings.qsr_alpha is None  # it is without effect, and left out with a line
    for wrong in (["--outer_lr", 0], ["--outer_momentum", 1]):
        assert wrong[0] in refused("--strategy", "local", "--sync_rule", "diloco", *wrong)


def test_longer_rounds_must_begin_within_the_run():
    flags = ["--strategy", "local", "--sync_rule", "swap", "--epochs", 3]
    assert settings_of(*flags, "--sync_from", 1.5).sync_from == 1.5
    assert "beyond --epochs 3" in refused(*flags, "--sync_from", 4)
