"""Windows of random resized crops, for choices that are given."""

import numpy as np
import pytest

from utils.augment.resized_crop import ResizedCrop, ResizedCropPlan

ALMOST_1 = np.nextafter(1, 0)


@pytest.mark.parametrize(
    ("size", "ratio", "area", "window"),
    [
        # A square picture: ratios lie symmetrically about 1, areas evenly above the least one.
        ((100, 100), 0.5, 0.0, (20, 20)),
        ((100, 100), 0.5, 0.5, (72, 72)),  # an area of (0.04 + 1) / 2
        ((100, 100), 0.5, ALMOST_1, (100, 100)),
        ((100, 100), 0.0, 0.0, (23, 17)),  # width / height is 3/4 at least ...
        ((100, 100), ALMOST_1, 0.0, (17, 23)),  # ... and 4/3 at most
        ((100, 100), 0.0, ALMOST_1, (100, 75)),
        # At the largest ratio, its own, a wide picture is a window.
        ((60, 80), ALMOST_1, ALMOST_1, (60, 80)),
        ((60, 80), ALMOST_1, 0.0, (12, 16)),
        ((60, 80), 0.0, ALMOST_1, (60, 45)),
        ((80, 60), 0.0, ALMOST_1, (80, 60)),
    ],
)
def test_ratio_and_area_of_a_window(size, ratio, area, window):
    plan = ResizedCropPlan(*np.array([[ratio], [area], [ALMOST_1], [0.5], [0]]))
    (found,) = ResizedCrop(area=0.04).windows(plan, np.array([size]))
    height, width = window
    place = size[0] - height, (size[1] - width + 1) // 2
    assert found.tolist() == [*place, height, width]
