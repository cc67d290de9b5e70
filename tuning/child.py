"""The process of a trial: `python -m tuning.child ENTRY --flag value ...` is the entry itself.

It is told to save and stop (SIGTERM) when the search dies without a word. Linux only; elsewhere the
run goes on to its end, and the search, started again, waits for it.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from utils.launch.environment import PR_SET_PDEATHSIG

PARENT = "TUNING_PARENT"  # environment variable: the number of the process that searches


def main() -> None:
    entry = Path(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[PARENT]):  # it died before it could be followed
            sys.exit(128 + signal.SIGTERM)
    sys.argv = [str(entry), *sys.argv[2:]]
    sys.path.insert(0, str(entry.parent))
    runpy.run_path(str(entry), run_name="__main__")


if __name__ == "__main__":
    main()
