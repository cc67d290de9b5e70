"""The tuning entry of fake_entry.py: `python fake_tuning.py --flag value ...`.

FAKE_CLOCK: the search's clock advances by a second when a run starts or ends, and only then.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import fake_entry

from tuning import search as search_module
from tuning.entry import Target, search

TARGET = Target(fake_entry, Path(__file__).with_name("fake_space.yaml"))


def main(argv: list[str]) -> int:
    return search(TARGET, argv)


def runs_started_and_ended() -> int:
    path = Path(os.environ["FAKE_TRACE"])
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    if "FAKE_CLOCK" in os.environ:
        search_module.time = SimpleNamespace(monotonic=runs_started_and_ended, sleep=time.sleep)
    sys.exit(main(sys.argv[1:]))
