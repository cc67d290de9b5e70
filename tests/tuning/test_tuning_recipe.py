"""Stages, settings of a trial, and the recipe."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
import yaml
from small_spaces import RESNET50, RUNGS, recipe_of, space_of

import resnet50_test
from tuning.halving import ALLOWED, Rung, SeededSampler, build_rungs, is_waiting, next_to_promote
from tuning.recipe import Recipe, as_flags, to_yaml
from tuning.search import OF_THE_STUDY, Search, own_validation
from utils.errors import UserError
from utils.measures.table import MEASURES
from utils.settings.config import parse


@pytest.mark.parametrize(
    ("epochs", "subset"), [(9, 0.2), (5, 0.1), (1, 1.0), (12, 5000.0), (2, 50.0)]
)
@pytest.mark.parametrize(("number", "reduction"), [(3, 3), (2, 4), (4, 2)])
def test_rungs_grow_by_the_reduction(epochs, subset, number, reduction):
    rungs = build_rungs(epochs, subset, number, reduction)
    assert rungs[-1] == Rung(epochs, subset) and len(rungs) == len(set(rungs)) <= number
    if len(rungs) == number:
        for one, more in itertools.pairwise(rungs):
            ratio = more.epochs * more.subset / (one.epochs * one.subset)
            assert ratio == pytest.approx(reduction, rel=0.45)
            assert more.epochs >= one.epochs and more.subset >= one.subset
    whole = epochs * subset / reduction ** (number - 1)
    assert rungs[0].epochs * rungs[0].subset == pytest.approx(whole, rel=0.05, abs=1.01)
    assert build_rungs(epochs, subset, 1, reduction) == [Rung(epochs, subset)]


def halve(scores, rungs=3, reduction=3):
    """Runs a search of trials with these scores, the same at every rung: (the order of runs as
    (trial, rung), the last rung of each trial)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    order, done = [], {}
    while True:
        frozen = study.get_trials(deepcopy=False)
        full = len(frozen) == len(scores)
        chosen = next_to_promote(frozen, rungs, reduction, at_end=full)
        if chosen is None and full:
            return order, done
        if chosen is None:
            trial = study.ask()
            number = trial.number
            first = last = rungs - 1 if number == 0 else 0
        else:
            number, first = chosen.number, chosen.last_step + 1
            trial = optuna.trial.Trial(study, chosen._trial_id)
            trial.set_user_attr(ALLOWED, first)
            last = first
        for rung in range(first, last + 1):
            order.append((number, rung))
            trial.report(scores[number], rung)
            done[number] = rung
        if done[number] == rungs - 1:
            study.tell(trial, scores[number])


def test_halving_continues_the_best_fraction():
    order, done = halve([50, 9, 11, 8, 12, 13, 7, 11.8, 10, 14, 1, 2, 3])
    # The default, to its end; of three others the best, 2; of six the best of the rest, 5; ...
    assert order[:5] == [(0, 2), (1, 0), (2, 0), (3, 0), (2, 1)]
    assert order.index((5, 1)) == order.index((6, 0)) + 1
    assert {number for number, rung in done.items() if rung >= 1} == {0, 2, 4, 5, 9}
    # ... and at the next rung, when 9 is the third there, the best of the three.
    assert [number for number, rung in done.items() if rung == 2] == [0, 9]
    assert order.index((9, 2)) == order.index((9, 1)) + 1


def test_one_trial_reaches_the_last_rung_however_few_there_are():
    for count in range(2, 7):
        _, done = halve([50, *range(count - 1)])
        assert done[count - 1] == 2 and done[0] == 2
    assert halve([50]) == ([(0, 2)], {0: 2})


def test_a_trial_is_unfinished_until_its_end_is_recorded():
    """If its process dies after it has reported the last stage, another one finishes it."""
    study = optuna.create_study(direction="maximize")
    study.ask()
    trial = study.ask()
    trial.report(1.0, 0)
    (frozen,) = study.get_trials(deepcopy=False)[1:]
    assert is_waiting(frozen, rungs=2) and not is_waiting(frozen, rungs=1)


def test_a_failed_trial_does_not_count_in_halving():
    study = optuna.create_study(direction="maximize")
    study.ask()
    for score in (3.0, 2.0, 1.0):
        study.ask().report(score, 0)
    study.tell(1, state=optuna.trial.TrialState.FAIL)  # it was the best, and failed at stage 1
    frozen = study.get_trials(deepcopy=False)
    assert next_to_promote(frozen, 3, 9, at_end=False) is None
    assert next_to_promote(frozen, 3, 9, at_end=True).number == 2


def test_halving_with_one_rung_stops_no_trial():
    order, done = halve([1, 2, 3, 4], rungs=1)
    assert order == [(0, 0), (1, 0), (2, 0), (3, 0)] and set(done.values()) == {0}


def test_proposals_depend_on_seed_and_number_alone():
    def study(seed):
        return optuna.create_study(direction="maximize", sampler=SeededSampler("tpe", seed))

    def proposals(one, count):
        found = []
        for _ in range(count):
            trial = one.ask()
            found.append((trial.suggest_float("a", 0, 1), trial.suggest_float("b", 1, 9, log=True)))
            one.tell(trial, -abs(found[-1][0] - 0.3))
        return found

    whole = proposals(study(1), 14)
    assert whole != proposals(study(2), 14)
    broken = study(1)
    first = proposals(broken, 9)
    # As in a new process: another sampler with the same history.
    broken.sampler = SeededSampler("tpe", 1)
    assert first + proposals(broken, 5) == whole


def test_the_sampler_learns_from_waiting_trials():
    """It proposes the same as if they had been pruned."""

    def proposals(wait):
        study = optuna.create_study(direction="maximize", sampler=SeededSampler("tpe", 3))
        found = []
        for _ in range(40):
            trial = study.ask()
            value = trial.suggest_float("a", 0, 1)
            trial.report(-abs(value - 0.8), 0)
            if not wait:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            found.append(value)
        return found

    waiting, pruned = proposals(True), proposals(False)
    assert waiting == pruned
    assert abs(sum(waiting[-10:]) / 10 - 0.8) < 0.15


def test_data_with_a_validation_split_of_their_own(tmp_path):
    def own(*folders, **settings):
        base, _ = parse(resnet50_test.Settings, ["--data_dir", str(tmp_path)], "")
        for name in folders:
            (tmp_path / name).mkdir(exist_ok=True)
        return own_validation(replace(base, dataset="imagefolder", **settings))

    assert not own("train", "val")
    assert own(val_is_validation=True)
    assert own("test")


def test_settings_that_need_a_validation_split_keep_it():
    for flags in (["--sched", "plateau"], ["--early_stop_patience", "3"], ["--no_final_test"]):
        assert recipe_of(flags).handed_over({})["val_fraction"] == 0.2
    assert recipe_of(["--sched", "plateau"]).of_trial({}, RUNGS[1], 0)["eval_every"] == 1


def test_the_recipe_has_no_setting_of_the_machine(tmp_path):
    flags = ["--cache_dir", "/x", "--threads", "3", "--device", "cpu", "--workers", "2"]
    flags += ["--dataset", "imagefolder", "--data_dir", "my_pictures"]
    handed = recipe_of(flags).handed_over({"lr": 0.2})
    assert not {"cache_dir", "threads", "device", "workers"} & {*handed}
    assert handed["data_dir"] == "my_pictures"
    path = tmp_path / "best.yaml"
    path.write_text(to_yaml(handed, ["found", "by"]))
    assert path.read_text().startswith("# found\n# by\n")
    settings, _ = parse(resnet50_test.Settings, ["--config", str(path)], "")
    assert settings.lr == 0.2 and settings.depth == 50


def test_recipe_and_flags_make_a_trials_settings(tmp_path):
    flags = ["--warmup_epochs", "5", "--early_stop_patience", "3"]
    recipe = recipe_of(flags, batch=256)  # trials have the default batch and rate
    handed = recipe.handed_over({})
    trial = recipe.in_full(recipe.of_trial({}, Rung(10, 0.2), 3), handed)
    assert (trial["batch_size"], trial["early_stop_patience"]) == (128, None)
    path = tmp_path / "best.yaml"
    path.write_text(yaml.safe_dump(handed))
    flags = as_flags(trial, handed)
    again, _ = parse(resnet50_test.Settings, ["--config", str(path), *flags], "")
    for name, value in trial.items():
        assert getattr(again, name) == value, name


def test_mirror_images_are_for_the_recipe_not_for_trials():
    """Trials do not measure the test set, where alone --flip_test has an effect."""
    recipe = recipe_of(["--flip_test"])
    assert "eval_views" not in recipe.of_trial({"lr": 0.2}, Rung(10, 0.2), 0)
    assert recipe.handed_over({"lr": 0.2})["eval_views"] == "mirror"


def test_contradictory_values_are_refused():
    recipe = recipe_of([])
    with pytest.raises(UserError, match="--min_lr"):
        recipe.of_trial({"lr": 0.1, "min_lr": 0.2}, Rung(2, 0.1), 0)


def test_a_data_set_that_the_folder_implies_is_part_of_the_recipe(tmp_path):
    (tmp_path / "pictures" / "train").mkdir(parents=True)
    flags = ["--data_dir", str(tmp_path / "pictures"), "--val_is_validation", "--on_bad", "skip"]
    flags += ["--workers", "2", "--cache_dir", str(tmp_path / "cache")]
    space, raw, _ = space_of(RESNET50.space, *flags)
    assert raw["dataset"] == "imagefolder"
    recipe = Recipe(space, RUNGS, None, None)
    trial = recipe.of_trial({"lr": 0.2}, RUNGS[0], 0)
    assert {"dataset", "val_is_validation", "on_bad", "workers", "cache_dir"} <= {*trial}
    handed = recipe.handed_over({"lr": 0.2})
    assert (handed["dataset"], handed["val_is_validation"]) == ("imagefolder", True)
    path = tmp_path / "best.yaml"
    path.write_text(to_yaml(handed, []))
    settings, _ = parse(resnet50_test.Settings, ["--config", str(path)], "")
    assert settings.dataset == "imagefolder" and settings.val_is_validation


def test_what_a_folder_implies_does_not_tell_studies_apart():
    """Studies from before it was part of the recipe can be continued."""
    settings = SimpleNamespace(**dict.fromkeys(OF_THE_STUDY), trial_val_fraction=0.2)
    space = SimpleNamespace(raw={"dataset": "imagefolder", "depth": 18}, parameters=[])
    search = SimpleNamespace(
        settings=settings, space=space, implied={"dataset"}, seed=0, target=RESNET50,
        measure=MEASURES["accuracy"],
    )  # fmt: skip
    plan = Search._plan(search)
    assert plan["depth"] == 18 and "dataset" not in plan
