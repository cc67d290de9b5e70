"""How settings follow the length of a trial and the batch of the recipe."""

import pytest
from small_spaces import parameter, recipe_of

from tuning.halving import Rung
from utils.errors import UserError


def test_lengths_in_epochs_keep_their_fraction_of_the_run():
    recipe = recipe_of(
        ["--sched", "multistep", "--milestones", "25,40", "--warmup_epochs", "5", "--mixup", "0.2",
         "--mixup_off_epoch", "45", "--early_stop_patience", "3"]
    )  # fmt: skip
    last = recipe.of_trial({"lr": 0.3}, Rung(10, 0.2), seed=4)
    assert last["milestones"] == "5,8" and last["warmup_epochs"] == 1
    assert last["mixup_off_epoch"] == 9 and "early_stop_patience" not in last
    assert last["lr"] == 0.3 and last["seed"] == 4 and last["final_test"] is False
    assert last["baseline"] is False
    assert (last["epochs"], last["subset"], last["val_fraction"]) == (10, 0.2, 0.2)
    handed = recipe.handed_over({"lr": 0.3})
    assert handed["milestones"] == "25,40" and handed["warmup_epochs"] == 5
    assert handed["epochs"] == 50 and handed["lr"] == 0.3
    assert not {"subset", "final_test"} & {*handed}


@pytest.mark.parametrize(("epoch", "of_trial"), [(33, 7), (32, 6), (49, 9), (1, 1)])
def test_whole_epochs_are_rounded(epoch, of_trial):
    """Within the trial: not to its start, nor to its end."""
    mixed = recipe_of(["--mixup", "0.2", "--mixup_off_epoch", str(epoch)])
    assert mixed.of_trial({}, Rung(10, 0.2), 0)["mixup_off_epoch"] == of_trial
    frozen = ["--pretrained", "x.pth", "--freeze_backbone", "--unfreeze_epoch", str(epoch)]
    assert recipe_of(frozen).of_trial({}, Rung(10, 0.2), 0)["unfreeze_epoch"] == of_trial


def test_a_tuned_fraction_of_the_epochs():
    warmup = parameter("warmup_epochs", 0, 0.4, 0.0, of_epochs=True)
    recipe = recipe_of(["--epochs", "50"], parameters=[warmup])
    assert recipe.of_trial({"warmup_epochs": 0.2}, Rung(10, 0.2), 0)["warmup_epochs"] == 2
    assert recipe.handed_over({"warmup_epochs": 0.2})["warmup_epochs"] == 10


def test_a_warm_up_in_steps_keeps_its_fraction():
    flags = ["--warmup_steps", "1000", "--epochs", "50"]
    assert recipe_of(flags).of_trial({}, Rung(10, 0.2), 0)["warmup_steps"] == 40
    few = [Rung(10, 2000)]
    recipe = recipe_of(flags, rungs=few, subset=10_000)
    assert recipe.of_trial({}, few[0], 0)["warmup_steps"] == 40
    with pytest.raises(UserError, match="--subset 2000: to shorten the warm-up of 1000 steps"):
        recipe_of(flags, rungs=few)
    warmup = parameter("warmup_epochs", 0, 0.4, 0.0, of_epochs=True)
    space = recipe_of(flags, parameters=[warmup]).space
    assert not space._applies(warmup, {})
    assert recipe_of([], parameters=[warmup]).space._applies(warmup, {})


def test_a_stage_of_one_epoch_trains_everything():
    recipe = recipe_of(["--pretrained", "x.pth", "--freeze_backbone", "--unfreeze_epoch", "2"])
    first, last = (recipe.of_trial({}, Rung(epochs, 0.1), 0) for epochs in (1, 10))
    assert not {"freeze_backbone", "unfreeze_epoch"} & {*first}
    assert last["freeze_backbone"] and last["unfreeze_epoch"] == 1


def test_the_round_of_post_local_keeps_its_fraction_of_the_run():
    flags = ["--strategy", "local", "--local_workers", "2", "--sync_rule", "post_local"]
    recipe = recipe_of([*flags, "--sync_from", "40", "--epochs", "50"])
    assert recipe.of_trial({}, Rung(10, 0.2), 0)["sync_from"] == 8
    assert recipe.handed_over({})["sync_from"] == 40


@pytest.mark.parametrize(
    ("flags", "epochs", "patience"),
    [
        ([], 20, 2),  # the default of 5 in 50 epochs
        (["--plateau_patience", "10"], 10, 2),
        (["--plateau_patience", "10", "--eval_every", "2"], 10, 4),  # each 2 epochs in the recipe
        (["--plateau_patience", "10"], 1, 1),
        (["--plateau_patience", "0"], 10, 0),
    ],
)
def test_the_patience_of_plateau_keeps_its_fraction_of_the_run(flags, epochs, patience):
    recipe = recipe_of(["--sched", "plateau", *flags])
    trial = recipe.of_trial({"gamma": 0.2}, Rung(epochs, 0.2), 0)
    assert (trial.get("plateau_patience"), trial["eval_every"]) == (patience, 1)
    given = int(flags[1]) if flags else None
    assert recipe.handed_over({"gamma": 0.2}).get("plateau_patience") == given
    assert "plateau_patience" not in recipe_of([]).of_trial({}, Rung(epochs, 0.2), 0)


@pytest.mark.parametrize(
    ("flags", "factor", "rule"),
    [
        ([], 4, "linear rule"),
        (["--optimizer", "madgrad"], 4, "linear rule"),
        (["--optimizer", "adamw"], 2, "square-root rule"),
        (["--ngd"], 2, "square-root rule"),
        (["--ngd", "--ngd_norm", "gradient"], 4, "linear rule"),
    ],
)
def test_the_rate_scales_with_the_batch_by_the_optimizers_rule(flags, factor, rule):
    recipe = recipe_of([*flags, "--bs", "64"], batch=256)
    handed = recipe.handed_over({"lr": 0.01})
    assert handed["lr"] == 0.01 * factor and handed["batch_size"] == 256
    said = recipe.lr_rule({"lr": 0.01})
    assert rule in said and "at a batch of 64" in said and "at 256" in said
    assert "batch_size" in recipe.of_trial({"lr": 0.01}, Rung(2, 0.1), 0)
    same = recipe_of([*flags, "--bs", "64"])
    assert same.handed_over({"lr": 0.01})["lr"] == 0.01
    assert "stays unchanged" in same.lr_rule({"lr": 0.01})


@pytest.mark.parametrize("keeper", ["global_batch", "lr_base_size"])
def test_a_rate_that_suits_any_batch_is_not_scaled(keeper):
    flags = ["--distributed", "--bs", "64", f"--{keeper}", "1024"]
    recipe = recipe_of(flags, batch=256)
    handed = recipe.handed_over({"lr": 0.01})
    assert (handed["lr"], handed["batch_size"]) == (0.01, 256)
    assert f"stays unchanged, as there is --{keeper}" in recipe.lr_rule({"lr": 0.01})


def test_a_tuned_batch_size_is_in_the_recipe():
    recipe = recipe_of(["--batch_size", "128"])
    handed = recipe.handed_over({"batch_size": 32, "lr": 0.2})
    assert (handed["batch_size"], handed["lr"]) == (32, 0.2)
    handed = recipe_of([], batch=64).handed_over({"batch_size": 32, "lr": 0.2})
    assert (handed["batch_size"], handed["lr"]) == (64, 0.4)


RATES = ["--min_lr", "0.0002", "--warmup_lr", "0.0004", "--warmup_steps", "100"]
RATES += ["--head_lr", "0.04"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], (0.04, 0.16, 0.0008, 0.0016, 25)),
        (["--optimizer", "adamw"], (0.02, 0.08, 0.0004, 0.0008, 25)),
        # The run multiplies the learning rates of the network and its head by the ratio.
        (["--distributed", "--lr_base_size", "512"], (0.01, 0.04, 0.0008, 0.0016, 25)),
        (["--distributed", "--global_batch", "1024"], (0.01, 0.04, 0.0002, 0.0004, 100)),
    ],
)
def test_the_whole_schedule_scales_with_the_batch(flags, found):
    recipe = recipe_of([*RATES, *flags, "--bs", "64"], batch=256)
    handed = recipe.handed_over({"lr": 0.01})
    names = ("lr", "head_lr", "min_lr", "warmup_lr", "warmup_steps")
    assert tuple(handed[name] for name in names) == found
    said = recipe.lr_rule({"lr": 0.01})
    changed = handed["min_lr"] != 0.0002
    assert (f"min_lr 0.0002 becomes {handed['min_lr']:g}" in said) == changed
    assert ("warmup_steps 100 becomes 25" in said) == changed
    same = recipe_of([*RATES, *flags, "--bs", "64"])
    assert same.handed_over({"lr": 0.01})["min_lr"] == 0.0002
    assert "min_lr" not in same.lr_rule({"lr": 0.01})
