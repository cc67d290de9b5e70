"""mixup_policy.png."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from utils.reporting.mixup import draw_mean_lambda


@pytest.mark.parametrize("count", [2, 10, 40, 100])
def test_it_is_drawn_for_any_number_of_classes(tmp_path, count):
    mean = np.random.default_rng(0).uniform(0.5, 1, (count, count))
    names = [f"class {i} $x_1 猫" for i in range(count)]
    draw_mean_lambda((mean + mean.T) / 2, names, tmp_path / "policy.png")
    with Image.open(tmp_path / "policy.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300


def test_one_number_for_all_pairs_is_written(tmp_path, monkeypatch):
    texts = []
    write = Figure.text

    def text(self, x, y, s, **style):
        texts.append(s)
        return write(self, x, y, s, **style)

    monkeypatch.setattr(Figure, "text", text)
    draw_mean_lambda(np.full((3, 3), 0.75), ["a", "b", "c"], tmp_path / "policy.png")
    assert (tmp_path / "policy.png").stat().st_size > 0
    assert "0.750" in texts and any(text.endswith("for all pairs of classes") for text in texts)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(OSError):
        draw_mean_lambda(np.full((2, 2), 0.75), ["a", "b"], tmp_path / "gone" / "policy.png")
