#!/usr/bin/env python3
"""Searches settings for a ResNet on pictures: by default ResNet-50 on CIFAR-10.

bash tuning/resnet50_tuning.sh --subset 0.1 --trials 20
bash tuning/resnet50_tuning.sh --ngd --timeout 30m
python resnet50_test.py --config runs/tuning-.../best.yaml
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import resnet50_test
from tuning.flags import TuningFlags
from tuning.search import Target, search


@dataclass
class Settings(TuningFlags, resnet50_test.Settings):
    """Those of the entry, and those of a search."""


TARGET = Target(
    config_class=resnet50_test.Settings,
    script=Path(resnet50_test.__file__).resolve(),
    model=resnet50_test.model_name,
    space=Path(__file__).with_name("resnet50_space.yaml"),
)


def main(argv: list[str] | None = None) -> int:
    return search(TARGET, Settings, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
