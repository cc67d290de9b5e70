"""The tuning entry of fake_entry.py: `python fake_tuning.py --flag value ...`."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import fake_entry

from tuning.flags import TuningFlags
from tuning.search import Target, search


@dataclass
class Settings(TuningFlags, fake_entry.Settings):
    pass


TARGET = Target(
    config_class=fake_entry.Settings,
    script=Path(fake_entry.__file__).resolve(),
    model=lambda settings: f"fake{settings.depth}",
    space=Path(__file__).with_name("fake_space.yaml"),
)


def main(argv: list[str] | None = None) -> int:
    return search(TARGET, Settings, "A search.", argv)


if __name__ == "__main__":
    sys.exit(main())
