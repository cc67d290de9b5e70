#!/usr/bin/env python3
"""Writes synthetic pictures as files, in a folder for each class, for `make demo`.

    python benchmarks/demo_pictures.py data/demo_pictures

They are drawn as those of `--dataset shapes`, PER_CLASS of each shape. Files that are there stay.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from utils.data.images.shapes import SHAPES, draw

PER_CLASS = 200


def main(folder: Path) -> None:
    for number, name in enumerate(SHAPES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place, picture in enumerate(draw(name, PER_CLASS, np.random.default_rng(number))):
            if not (path := folder / name / f"{place:03}.png").exists():
                Image.fromarray(picture).save(path)
    print(f"{folder}: {PER_CLASS} synthetic pictures of each of {len(SHAPES)} shapes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
