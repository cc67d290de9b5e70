"""An entry that "trains" in milliseconds: its accuracy is a formula of its settings.

FAKE_SECONDS: how long it takes. FAKE_TRACE: a file to which every start and end of a run adds a
line. FAKE_HOLD: a run ("0001/rung0") that waits in its middle until it is told to stop. It saves
after each tenth, honours SIGTERM and --resume, and fails like the real ones.
"""

import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError
from utils.launch.signals import Signals, StoppedBySignal
from utils.setting import setting
from utils.settings import ImageSettings
from utils.settings.config import parse, to_yaml

TRAIN, STEPS = 10_000, 10


@dataclass
class Settings(ImageSettings):
    entry = "fake_entry.py"
    depth: int = setting(18, "Layers", group="model", low=1)
    crash_above: float = setting(9.0, "Exit code 1 above this rate", group="model")
    memory_above: float = setting(9.0, "Killed above this rate", group="model")
    early_above: float = setting(9.0, "Out of memory above this rate", group="model")
    out_of_disk: bool = setting(False, "No space", group="model")


def accuracy(settings: Settings) -> float:
    """Highest at a rate of 0.3 and a smoothing of 0.1; more epochs and data help."""
    amount = settings.epochs * (settings.subset if settings.subset <= 1 else 0.1)
    distance = math.log10(settings.lr / 0.3) ** 2 + 4 * (settings.label_smoothing - 0.1) ** 2
    noise = math.sin(1e4 * settings.lr + settings.seed)
    return 90 * amount / (amount + 0.3) - 20 * distance + 0.2 * noise


def model_name(settings: Settings) -> str:
    return f"fake{settings.depth}"


def trace(line: str) -> None:
    if "FAKE_TRACE" in os.environ:
        with open(os.environ["FAKE_TRACE"], "a") as file:
            file.write(f"{line}\n")


def train(settings: Settings, origin, signals: Signals) -> None:
    folder = Path(settings.resume or settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    signals.defer()
    (folder / "config.yaml").write_text(f"# fake_entry.py\n{to_yaml(settings, origin)}")
    saved = folder / "step"
    first = int(saved.read_text()) if saved.exists() else 0
    name = f"{folder.parent.name}/{folder.name}"
    trace(f"start {name} {first}")
    if settings.lr > settings.crash_above:
        raise RuntimeError("a bug")
    if settings.lr > settings.memory_above:
        os.kill(os.getpid(), 9)
    if settings.lr > settings.early_above:  # as a run that fails before its first step
        shutil.rmtree(folder)
        raise UserError("CUDA is out of memory")
    if settings.out_of_disk:
        raise UserError("no checkpoint of step 1: No space left on device")
    if settings.lr > 0.9:
        raise UserError("step 3: the loss or its gradient is not finite; the step was not applied")
    for step in range(first, STEPS):
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0")) / STEPS)
        saved.with_name("new").write_text(str(step + 1))
        saved.with_name("new").replace(saved)
        if step == STEPS // 2 and name == os.environ.get("FAKE_HOLD"):
            trace(f"hold {name}")
            while not signals.received:
                time.sleep(0.01)
        if signals.received:
            raise StoppedBySignal(signals.received, "stopped and saved")
    record = {"step": STEPS, "split": "val", "accuracy": accuracy(settings), "samples": 2000}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    samples = settings.subset * TRAIN if settings.subset <= 1 else settings.subset
    summary = {"status": "finished", "train_samples": samples, "epochs": settings.epochs}
    summary |= {"steps": 40, "seconds_total": 1.0}
    (folder / "summary.new").write_text(json.dumps(summary))
    trace(f"end {name}")
    (folder / "summary.new").replace(folder / "summary.json")


def main() -> int:
    signals = Signals()
    try:
        settings, origin = parse(Settings, sys.argv[1:], "fake")
        train(settings, origin, signals)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StoppedBySignal as stopped:
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
