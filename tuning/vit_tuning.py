#!/usr/bin/env python3
"""Searches settings for a Vision Transformer, or any classifier of timm: by default on CIFAR-10.

bash tuning/vit_tuning.sh --subset 0.1 --trials 20
bash tuning/vit_tuning.sh --model convnext_tiny --timeout 30m
python vit_test.py --config runs/tuning-.../best.yaml
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import vit_test
from tuning.flags import TuningFlags
from tuning.search import Target, search


@dataclass
class Settings(TuningFlags, vit_test.Settings):
    """Those of the entry, and those of a search."""


TARGET = Target(
    config_class=vit_test.Settings,
    script=Path(vit_test.__file__).resolve(),
    model=vit_test.model_name,
    space=Path(__file__).with_name("vit_space.yaml"),
)


def main(argv: list[str] | None = None) -> int:
    return search(TARGET, Settings, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
