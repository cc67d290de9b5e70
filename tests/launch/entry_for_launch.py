"""An entry script without training, for the tests of launches: it does what --do says."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from utils.entry import end_process
from utils.launch import environment
from utils.setting import setting
from utils.settings import TrainSettings
from utils.settings.config import parse


@dataclass
class Settings(TrainSettings):
    entry = "entry_for_launch.py"
    dataset: str = setting("none", "Anything", group="test")
    distributed: bool = setting(False, "Of many", group="test", resume="free")
    do: str = setting(
        "end", "What each rank does", group="test", choices=("end", "mistake", "fail", "fail_once",
        "kill", "train", "stubborn", "meet"),
    )  # fmt: skip


def note(path: Path, text: str) -> None:
    """Appends a line in one write, so that those of several processes stay whole."""
    with path.open("a", buffering=1) as file:
        file.write(text + "\n")


def meet() -> int:
    """The sum of the ranks + 1, over gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total)


def main() -> int:
    stopped = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stopped.append(signum))
    signal.signal(signal.SIGINT, lambda signum, frame: stopped.append(signum))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda signum, frame: stopped.append(signum))
    environment.die_with_launcher()
    code = environment.previous_exit_code()
    folder = Path(os.environ["NOTES"])
    me = environment.launched()
    variables = ("MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
                 "TORCH_CPP_LOG_LEVEL")  # fmt: skip
    start = {"rank": me.rank, "size": me.world_size, "restarts": me.restarts, "pid": os.getpid()}
    start |= {"argv": sys.argv[1:], "folder": os.environ["LAUNCH_FOLDER"], "code": code}
    note(folder / "starts", json.dumps(start | {v: os.environ.get(v) for v in variables}))
    if code is not None:
        return code
    settings, _ = parse(Settings, sys.argv[1:], "")
    last = me.rank == me.world_size - 1
    if settings.do == "mistake":
        if environment.note_exit_code(2):
            print("error: the data is wrong", file=sys.stderr)
        return 2
    if settings.do == "fail" and last:
        print("what went wrong", file=sys.stderr)
        return 7
    if settings.do == "fail_once" and last and me.restarts == 0:
        return 7
    if settings.do == "kill" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.do == "meet":
        note(folder / "met", f"{meet()} {me.world_size}")
    while settings.do not in ("end", "fail_once"):
        time.sleep(0.05)
        if stopped and settings.do != "stubborn":
            note(folder / "saved", str(me.rank))
            return 128 + stopped[0]
    return 0


if __name__ == "__main__":
    end_process(main())
