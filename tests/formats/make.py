#!/usr/bin/env python3
"""Keeps what this revision writes, for the tests of all later ones: python tests/formats/make.py

Makes the fixtures that do not exist yet. Existing ones are never made again: they stand for the
files that users have.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from short_runs import PICTURES, RESUME, TEXTS, TOKENS, call, launched, write_data  # noqa: E402

SMALL = f"{PICTURES} --width 1"
# Runs of two epochs, interrupted in the second.
RUNS = {
    "pictures_sgd": f"{SMALL} --val_fraction 0.25 --sched plateau --early_stop_patience 9",
    "pictures_ngd": f"{SMALL} --ngd --ngd_rank 2 --meta_learning --meta_every 2 --meta_batch 8 "
    "--ema_decay 0.9 --lookahead_k 2",
    "pictures_fsdp": launched(f"{SMALL} -b 8 --strategy fsdp --optimizer adamw --clip 1", 2),
    "pictures_local": f"{SMALL} -b 8 --strategy local --local_workers 2 --sync_rule diloco "
    "--sync_base 4 --bn_batches 4 --optimizer adamw --optimizer_average --ema_decay 0.9",
    "texts_adamw": f"{TOKENS} --mixup fixed",
    "texts_muon": f"{TEXTS} --optimizer muon --accumulation_steps 2 --save_every 2",
}
# Folder -> commands, and which of their files are kept.
OTHERS = {
    "exported": ([f"{SMALL} --epochs 1", f"{RESUME} --export safetensors"],
                 "run/export/*.safetensors"),
    "tuned": (["bash tuning/resnet50_tuning.sh --dataset imagefolder --data_dir ../pictures "
              "--depth 18 --width 1 -b 16 --epochs 2 --threads 1 --device cpu --params lr,momentum "
              "--no_prune --trials 2 --subset 1 --confirm 0 --val_fraction 0.25 --output study"],
              "study/best.yaml"),
}  # fmt: skip


def break_off(run: Path) -> None:
    """Leaves a run as a kill just before the last checkpoint does; the rest of its metrics is what
    a resumed run must reproduce."""
    *earlier, kept, last = sorted((run / "checkpoints").iterdir())
    for path in [*earlier, last]:
        shutil.rmtree(path)
    state = json.loads((kept / "state.json").read_text())
    lines = (run / "metrics.jsonl").read_bytes()
    (run.parent / "expected.jsonl").write_bytes(lines[state["metrics_bytes"] :])
    for path in [*run.glob("*.png"), *(run / name for name in ("summary.json", ".lock"))]:
        path.unlink(missing_ok=True)
    shutil.rmtree(run / "tensorboard", ignore_errors=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write_data(Path(scratch))
        for name, command in RUNS.items():
            folder = Path(scratch) / name
            if not (HERE / name).exists():
                folder.mkdir()
                call(ROOT, f"{command} --checkpoint_hist 99", folder, check=True)
                break_off(folder / "run")
                shutil.rmtree(folder / "cache", ignore_errors=True)
                shutil.copytree(folder, HERE / name)
        for name, (commands, kept) in OTHERS.items():
            folder = Path(scratch) / name
            if not (HERE / name).exists():
                folder.mkdir()
                for command in commands:
                    call(ROOT, command, folder, check=True)
                (HERE / name).mkdir()
                for path in folder.glob(kept):
                    shutil.copy(path, HERE / name)


if __name__ == "__main__":
    main()
