"""Which ranges of a space a search uses, given the flags and the settings above them."""

import pytest
from small_spaces import RESNET50, space_of, tuned

from utils.errors import UserError
from utils.optim.table import OPTIMIZERS


@pytest.mark.parametrize(
    "flags",
    [
        ["--min_lr", "0.002"],
        ["--warmup_lr", "0.01", "--warmup_epochs", "2"],
        ["--strategy", "local", "--local_workers", "2"],
    ],
    ids=" ".join,
)
def test_flags_need_not_suit_optimizers_that_no_trial_uses(space_file, flags):
    """Each of these is refused beside another optimizer's learning rate, or beside madgrad."""
    space, _, _ = space_of(RESNET50.space, *flags)
    assert tuned(space)["lr"] == OPTIMIZERS["sgd"].lr
    path = space_file("optimizer: {choices: [sgd, fusedsgd]}\nlr: {of: optimizer}\n")
    space, _, _ = space_of(path, *flags)
    assert [one.when for one in space.parameters[1:]] == [
        {"optimizer": ("sgd",)},
        {"optimizer": ("fusedsgd",)},
    ]


def test_flags_that_do_not_suit_an_optimizer_of_the_search_are_refused(space_file):
    path = space_file("optimizer: {choices: [sgd, adamw]}\nlr: {of: optimizer}\n")
    with pytest.raises(UserError, match=r"space.yaml: lr, range 2: --min_lr 0.002 is above --lr"):
        space_of(path, "--min_lr", "0.002")


def test_a_condition_holds_by_settings_above_it(space_file):
    """A search proposes the settings of a space in their order."""
    text = "lr: {low: 0.001, high: 0.1, scale: log, default: 0.01, when: {optimizer: adamw}}\n"
    choices = "optimizer: {choices: [sgd, adamw]}\n"
    for order, names in (((choices, text), ["optimizer", "lr"]), ((text, choices), ["optimizer"])):
        space, _, _ = space_of(space_file("".join(order)))
        assert [one.name for one in space.parameters] == names
