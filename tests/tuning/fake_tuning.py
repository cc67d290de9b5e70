"""The tuning entry of fake_entry.py: `python fake_tuning.py --flag value ...`.

FAKE_CLOCK: the search's clock advances by a second when a run starts or ends, and only then.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import fake_entry

from tuning import search as search_module
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


def runs_started_and_ended() -> int:
    path = Path(os.environ["FAKE_TRACE"])
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    if "FAKE_CLOCK" in os.environ:
        search_module.time = SimpleNamespace(monotonic=runs_started_and_ended, sleep=time.sleep)
    sys.exit(main())
