#!/usr/bin/env python3
"""Searches settings for a Transformer on texts: by default on AG News.

bash tuning/transformer_tuning.sh --subset 0.1 --trials 20
bash tuning/transformer_tuning.sh --ngd --timeout 30m
python transformer_test.py --config runs/tuning-.../best.yaml
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import transformer_test
from tuning.flags import TuningFlags
from tuning.search import Target, search


@dataclass
class Settings(TuningFlags, transformer_test.Settings):
    """Those of the entry, and those of a search."""


TARGET = Target(
    config_class=transformer_test.Settings,
    script=Path(transformer_test.__file__).resolve(),
    model=transformer_test.model_name,
    space=Path(__file__).with_name("transformer_space.yaml"),
)


def main(argv: list[str] | None = None) -> int:
    return search(TARGET, Settings, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
