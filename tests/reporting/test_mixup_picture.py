"""mixup_policy.png."""

import numpy as np
import pytest
from PIL import Image

from utils.reporting.mixup import draw_mean_lambda


@pytest.mark.parametrize("count", [2, 10, 40, 100])
def test_it_is_drawn_for_any_number_of_classes(tmp_path, count):
    mean = np.random.default_rng(0).uniform(0.5, 1, (count, count))
    names = [f"class {i} $x_1 猫" for i in range(count)]
    draw_mean_lambda((mean + mean.T) / 2, names, tmp_path / "policy.png")
    with Image.open(tmp_path / "policy.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300


def test_it_is_drawn_if_all_pairs_are_alike(tmp_path):
    draw_mean_lambda(np.full((3, 3), 0.75), ["a", "b", "c"], tmp_path / "policy.png")
    assert (tmp_path / "policy.png").stat().st_size > 0


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(OSError):
        draw_mean_lambda(np.full((2, 2), 0.75), ["a", "b"], tmp_path / "gone" / "policy.png")
