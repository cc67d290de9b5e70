"""An entry script that injects faults into its processes, and records what they train on.

It is resnet50_test.py, or the module in ENTRY, with functions replaced in this process alone.
From the environment:
    NOTES   file of records, a JSON object a line
    FAULTS  JSON list of {"start": how often the processes had been restarted, "rank",
            "phase": one of `phases`, or "beginning", "count": at which call of it,
            "do": a key of ACTIONS}
    PACE    seconds added to every forward pass
"""

import importlib
import json
import os
import signal
import threading
import time

from utils.entry import Entry, end_process

entry = importlib.import_module(os.environ.get("ENTRY", "resnet50_test"))
Settings = entry.Settings
START, RANK = (int(os.environ.get(n, 0)) for n in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
SIZE = int(os.environ.get("WORLD_SIZE", 1))
LIFE = f"{os.environ.get('LAUNCH_FOLDER', os.getpid())}:{START}"


def note(**what) -> None:
    record = {"life": LIFE, "start": START, "rank": RANK, "size": SIZE, "time": time.time()} | what
    with open(os.environ["NOTES"], "ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())  # in one write: other processes append too


def fail() -> None:
    raise RuntimeError("a fault of this rank's own")


def end_the_launch() -> None:
    """Returns when the launcher has passed SIGTERM on to this process: no step comes between."""
    came = []

    def handler(signum, frame) -> None:
        came.append(signum)
        real(signum, frame)

    real = signal.signal(signal.SIGTERM, handler)
    os.kill(os.getppid(), signal.SIGTERM)
    while not came:
        time.sleep(0.01)


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": fail,
    "wait": lambda: time.sleep(8),
    "end the launch": end_the_launch,
    "kill the launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


class Phase:
    """Counts its calls, and carries out the faults that FAULTS has for them."""

    def __init__(self, name: str):
        faults = json.loads(os.environ.get("FAULTS", "[]"))
        own = [f for f in faults if (f["start"], f["rank"], f["phase"]) == (START, RANK, name)]
        self.name, self.faults = name, {fault["count"]: fault["do"] for fault in own}
        self.count, self.lock = 0, threading.Lock()

    def __call__(self) -> None:
        with self.lock:  # checkpoints are written in a thread
            self.count += 1
            action = self.faults.get(self.count)
        if action:
            note(fault=self.name, do=action)
            ACTIONS[action]()


def before(owner, name: str, action) -> None:
    """Calls `action`, with the same arguments, before each call of `name` of `owner`."""
    real = getattr(owner, name)

    def replacement(*args, **kwargs):
        action(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, replacement)


def phases() -> dict:
    """{name: (owner, function)}: where faults can strike."""
    import torch

    from utils.data.loader import Loader
    from utils.distributed.exchange import ProcessExchange
    from utils.training.objective import Classification
    from utils.training.trainer import Trainer

    return {
        "joining": (ProcessExchange, "__init__"),
        "loading": (Loader, "_targets"),
        "forward": (Classification, "__call__"),
        "backward": (torch.Tensor, "backward"),
        "reduction": (ProcessExchange, "sum"),
        "averaging": (ProcessExchange, "sum_rows"),
        "update": (Trainer, "update"),
        "writing": (os, "fsync"),
        "renaming": (os, "rename"),
    }


def install() -> None:
    from utils.checkpoints.checkpoint import Checkpoints
    from utils.checkpoints.saver import Saver
    from utils.data.loader import Loader
    from utils.training.objective import Classification
    from utils.training.trainer import Trainer

    latest = []

    def remember(loader, index) -> None:
        if loader.shuffle:
            latest[:] = index.tolist()

    def note_step(trainer, batch) -> None:
        note(step=trainer.progress.step, samples=[] if batch.filler else latest)

    before(Loader, "_targets", remember)
    before(Trainer, "forward_backward", note_step)
    before(Classification, "__call__", lambda *_: time.sleep(float(os.environ.get("PACE", 0))))
    before(Checkpoints, "_prune", lambda _, step, __: note(saved=step))
    before(Saver, "save", lambda _, checkpoint, *__: RANK or note(begun=checkpoint.step))
    for name, (owner, function) in phases().items():
        phase = Phase(name)
        before(owner, function, lambda *_, phase=phase, **__: phase())


def model_name(settings) -> str:
    """Installs the faults: it is called once, before the run begins."""
    note(pid=os.getpid())
    Phase("beginning")()
    install()
    return entry.model_name(settings)


if __name__ == "__main__":
    end_process(Entry(Settings, entry.build_model, model_name, entry.__doc__).main())
