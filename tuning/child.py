"""The process of a trial: `python -m tuning.child ENTRY --flag value ...` is the entry itself.

If the search is killed, the kernel sends this process SIGTERM, and it saves and stops. Linux only;
elsewhere the run goes on to its end, and a search that is started again waits for it.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from utils.launch.environment import PR_SET_PDEATHSIG

PARENT = "TUNING_PARENT"  # environment variable: process id of the search


def main() -> None:
    entry = Path(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[PARENT]):  # it died before the call above
            sys.exit(128 + signal.SIGTERM)
    sys.argv = [str(entry), *sys.argv[2:]]
    sys.path.insert(0, str(entry.parent))
    runpy.run_path(str(entry), run_name="__main__")


if __name__ == "__main__":
    main()
