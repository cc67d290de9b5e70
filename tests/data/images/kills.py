"""Kills of a process at every moment at which it makes something last."""

import os
import signal
import threading

from tqdm import tqdm


def killed_at(moment, function):
    """Runs `function` in another process, killed before its `moment`-th rename or flush to disk.
    Returns whether it ended before that."""
    child = os.fork()
    if child == 0:
        # Its own: tqdm's lock is shared with the processes that were forked, and one that is killed
        # while a thread of it draws would never release it.
        tqdm.set_lock(threading.RLock())
        counted = [0]

        def before(call):
            def counting(*args, **options):
                counted[0] += 1
                if counted[0] > moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return counting

        os.fsync, os.replace, os.rename = map(before, (os.fsync, os.replace, os.rename))
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, "it failed"
    return status == 0
