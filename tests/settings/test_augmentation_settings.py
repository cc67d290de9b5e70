"""Settings of augmentation and of the size of pictures, and what contradicts them."""

import pytest
from settings_of_pictures import noted, refused, settings_of

import vit_test
from utils.data.images.image_data import Form
from utils.errors import UserError
from utils.settings.config import parse
from utils.settings.images import size_schedule

OWN = ["--dataset", "imagefolder"]


def test_resized_crops_of_any_set():
    assert settings_of("--crop", "resized").decode == "auto"  # cifar10: on the device
    assert settings_of(*OWN, "--crop", "resized").decode == "always"
    assert settings_of(*OWN, "--crop", "resized", "--decode", "once").decode == "once"


def test_the_crop_at_evaluation_in_torchvisions_words():
    size = ["--train-crop-size", 176, "--val-crop-size", 224]
    settings = settings_of(*OWN, *size, "--val-resize-size", 256)
    assert (settings.image_size, settings.eval_size, settings.evaluated_part) == (176, 224, 0.875)
    assert settings.decode == "always"
    # As given: a recipe made of it takes another --eval_size.
    assert (settings.val_resize, settings.crop_ratio) == (256, 1)
    assert settings_of(*OWN, "--image_size", 112, "--val_resize", 128).evaluated_part == 0.875
    assert settings_of(*OWN, "--image_size", 32, "--eval_size", 32).decode == "auto"


def test_whole_pictures_are_not_cropped():
    flags = ["--resize_mode", "letterbox", "--image_size", 8]
    for part in (["--crop_ratio", 0.5], ["--val_resize", 16]):
        settings, lines = noted(*OWN, *flags, *part)
        assert settings.form == Form("letterbox") and settings.decode == "auto"
        why = "--resize_mode letterbox keeps the whole picture"
        assert lines == [f"note: {part[0]} has no effect: {why}"]
    settings = settings_of(*OWN, "--transparency", "black", "--white_level", 4095)
    assert settings.form == Form(transparency="black", white_level=4095)
    assert "use --loader workers" in refused(*OWN, *flags, "--loader", "dali")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--image_size", 200, "--val_resize", 100], "--val_resize 100: 200 pixels"),
        (["--image_size", 20, "--val_resize", 201], "20 to 200"),
        (["--val_resize", 100], "needs --image_size"),
        (["--eval_size", 100], "--image_size"),
        (["--image_size", 20, "--val_resize", 40, "--crop_ratio", 0.9], "leave one out"),
        (["--image_size", 20, "--eval_size", 24, "--decode", "once"], "--decode always"),
    ],
)
def test_sizes_that_contradict_each_other(flags, words):
    assert words in refused(*OWN, *flags)


def test_alternate_flips_mirror_half_of_the_pictures():
    assert settings_of("--alternate_flips").hflip == 0.5
    for flags in (["--hflip", 0.3], ["--hflip", 0], ["--dataset", "mnist"]):
        assert "or take --hflip 0.5" in refused("--alternate_flips", *flags)


def test_smaller_pictures_at_first():
    assert size_schedule("24:0.5") == (24, 0.5) and size_schedule("160:.29") == (160, 0.29)
    for text in ("24", "24:0", "24:0.0", "24:1", "4:0.5", "24:0.5,28:0.7", "x"):
        assert "as in 24:0.5" in refused("--image_size_schedule", text)
    flags = ["--image_size_schedule", "24:0.5"]
    for other in ("--time_budget 1m", "--engine ort", "--cuda_graphs on", "--cutmix_alpha 1"):
        assert "cannot be combined with --image_size_schedule" in refused(*flags, *other.split())
    with pytest.raises(UserError, match="positions for pictures of one size"):
        parse(vit_test.Settings, flags, "")
    parse(vit_test.Settings, [*flags, "--model", "resnet18"], "")


def test_jitter_beside_another_policy():
    _, lines = noted("--aa", "ra", "--color_jitter", "0.4")
    assert lines == [
        "note: --color_jitter has no effect: --auto_augment ra takes its place, as with timm"
    ]
    settings, lines = noted("--aa", "3a", "--color_jitter", "0.4", "0.4", "0.2")
    assert settings.color_jitter == "0.4,0.4,0.2" and not lines
    assert "--color_jitter" in refused("--color_jitter", "0.4,0.4")


def test_repeated_augmentation_in_others_words():
    assert settings_of("--ra-sampler").ra_reps == 3
    assert settings_of("--ra-sampler", "--ra-reps", 4).ra_reps == 4
    assert settings_of("--aug-repeats", 2).ra_reps == 2


def test_dali_of_a_recipe_is_for_files_alone(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{dataset: imagefolder, loader: dali}", encoding="utf-8")
    assert settings_of("--config", recipe).loader == "dali"
    assert settings_of("--config", recipe, "--dataset", "cifar10").loader == "workers"
