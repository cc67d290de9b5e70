"""Short runs across everything that the toolkit does.

`make same` compares them with those of another revision, and tests/formats keeps files of some.
"""

import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bird", "cat", "dog")
COMMON = "--threads 1 --device cpu --log_every 2 --save_every 3 --output run"
PICTURES = (
    "python resnet50_test.py --dataset imagefolder --data_dir ../pictures --cache_dir cache "
    f"--depth 18 --width 4 -b 16 --epochs 2 --workers 0 {COMMON}"
)
TEXTS = (
    "python transformer_test.py --dataset csv --train_file ../texts/train.csv "
    "--test_file ../texts/test.csv --cache_dir cache --vocab_size 300 --max_len 32 --layers 2 "
    f"--dim 16 --heads 2 --ffn 32 -b 16 --epochs 2 {COMMON}"
)
TOKENS = TEXTS.replace("-b 16", "--batch_tokens 100")
OWN_TOKENS = TEXTS.replace("--vocab_size 300 ", "")
RESUME = "python resnet50_test.py --resume run"
RESUME_TEXTS = "python transformer_test.py --resume run"
TUNING = "--no_prune --jobs 1 --trials 2 --confirm 1 --val_fraction 0.25 --output study"


def launched(command: str, processes: int) -> str:
    """The same command, by the launcher of this many processes."""
    return f"NPROC={processes} " + command.replace("python ", "bash run_distributed.sh ", 1)


# name -> commands, one after the other in a folder of the case's own, for `call`.
CASES: dict[str, list[str]] = {
    "help_pictures": ["python resnet50_test.py --help all"],
    "help_texts": ["python transformer_test.py --help all"],
    "help_tuning": ["bash tuning/resnet50_tuning.sh --help all"],
    "help_launcher": ["bash run_distributed.sh --help"],
    "unknown_flag": ["python resnet50_test.py --learning_rat 1"],
    "contradiction": [f"{PICTURES} --early_stop_patience 2"],
    "no_data": [PICTURES.replace("../pictures", "nowhere")],
    "shapes": [
        "python resnet50_test.py --dataset shapes --subset 64 --depth 50 --width 1 -b 32 "
        f"--epochs 1 {COMMON}"
    ],
    "headlines": [
        "python transformer_test.py --dataset headlines --subset 64 --layers 1 --dim 16 --heads 2 "
        f"--ffn 16 --epochs 1 --tokenizer bpe --vocab_size 500 {COMMON}"
    ],
    "sgd": [PICTURES],
    "adamw": [f"{PICTURES} --optimizer adamw --clip 1 --ema_decay 0.9"],
    "lamb": [f"{PICTURES} --optimizer lamb --lookahead_k 2 --sched linear --warmup_steps 2"],
    "muon": [f"{PICTURES} --optimizer muon --sched onecycle"],
    "madgrad": [f"{PICTURES} --optimizer madgrad --sched step --label_smoothing 0.1"],
    "ngd": [f"{PICTURES} --ngd --ngd_update_period 2 --sched multistep --zero_init_residual"],
    "ngd_channels": [f"{PICTURES} --ngd --ngd_axes channels --ngd_norm gradient --decay_all"],
    "mixup": [f"{PICTURES} --mixup fixed --alpha 0.4 --mixup_mode sample --log_clean_accuracy"],
    "cutmix": [f"{PICTURES} --mixup 0.2 --cutmix 1 --mixup_prob 0.7 --mixup_inter"],
    "meta_mixup": [f"{PICTURES} --meta_learning --meta_every 2 --meta_batch 8"],
    "meta_sample": [f"{PICTURES} --meta_learning --meta_form sample --meta_exact --meta_batch 8"],
    "fused_speed": [f"{PICTURES} --fused speed --mixup fixed"],
    "fused_memory": [f"{PICTURES} --fused memory --drop_path 0.2"],
    "bf16": [f"{PICTURES} --precision bf16 --no_channels_last"],
    "accumulation": [f"{PICTURES} -b 8 --accumulation_steps 2 --mixup fixed --mixup_block 8"],
    "workers": [f"{PICTURES} --workers 2 --random_erasing 0.5"],
    "plateau": [
        f"{PICTURES} --val_fraction 0.25 --sched plateau --plateau_patience 0 --epochs 4 "
        "--early_stop_patience 3 --report"
    ],
    "pretrained": [
        f"{PICTURES} --epochs 1",
        f"{PICTURES} --output tuned --pretrained run --freeze_backbone --unfreeze_epoch 1",
        f"{PICTURES} --output other --pretrained run/checkpoints/step-00000006/model.safetensors "
        "--max_steps 2",
    ],
    "resume": [
        f"{PICTURES} --ngd --meta_learning --meta_every 2 --meta_batch 8 --ema_decay 0.9 "
        "--epochs_for_sched 2 --epochs 1",
        f"{RESUME} --epochs 2 --log_every 1",
        RESUME,
        f"{RESUME} --lr 3",
        f"{PICTURES} --epochs 3",
    ],
    "use_pictures": [
        f"{PICTURES} --epochs 1 --ema_decay 0.5",
        f"{RESUME} --eval_only",
        f"{RESUME} --predict ../pictures/test",
        f"{RESUME} --export safetensors",
        f"{RESUME} --export onnx",
        f"{RESUME} --dry_run",
    ],
    "ddp": [launched(f"{PICTURES} -b 8 --sync_bn --mixup fixed", 2)],
    "ddp_ngd": [
        launched(f"{PICTURES} -b 8 --ngd --meta_learning --meta_every 2 --meta_batch 8", 2),
        RESUME + " --epochs 3",
    ],
    "fsdp": [
        launched(f"{PICTURES} -b 8 --strategy fsdp --optimizer adamw --clip 1 --ema_decay 0.9", 2),
        launched("python resnet50_test.py --resume run --epochs 3", 2),
    ],
    "fsdp_ngd": [launched(f"{PICTURES} -b 8 --strategy fsdp --ngd --accumulation_steps 2", 2)],
    "texts": [f"{TEXTS} --report"],
    "texts_ngd": [f"{TOKENS} --ngd --mixup fixed --token_dropout 0.1"],
    "texts_meta": [
        f"{TEXTS} --meta_learning --meta_every 2 --meta_batch 8 --mixup_at embeddings "
        "--attention_dropout 0.1"
    ],
    "texts_fused": [f"{TEXTS} --fused memory --pooling mean --tokenizer unigram"],
    "texts_ddp": [launched(TOKENS, 2)],
    "texts_fsdp": [launched(f"{TEXTS} --strategy fsdp --optimizer sgd", 2)],
    "use_texts": [
        f"{TEXTS} --epochs 1 --optimizer lamb",
        f"{RESUME_TEXTS} --epochs 2",
        f"{RESUME_TEXTS} --eval_only",
        f"{RESUME_TEXTS} --predict ../texts/test.csv",
        f"{RESUME_TEXTS} --export onnx",
        f"{OWN_TOKENS} --output tuned --pretrained run --freeze_backbone",
    ],
    "tune_pictures": [
        "bash tuning/resnet50_tuning.sh --dataset imagefolder --data_dir ../pictures --depth 18 "
        f"--width 4 -b 16 --epochs 2 --threads 1 --device cpu --params lr,label_smoothing {TUNING}"
    ],
    "tune_texts": [
        "bash tuning/transformer_tuning.sh --dataset csv --train_file ../texts/train.csv "
        "--test_file ../texts/test.csv --vocab_size 300 --layers 1 --dim 16 --heads 2 --ffn 16 "
        f"-b 16 --epochs 2 --threads 1 --device cpu --params lr,dropout {TUNING}"
    ],
}


# Cases with a command that is refused.
REFUSED = ("unknown_flag", "contradiction", "no_data", "resume")


def call(tree: Path, command: str, folder: Path, **options) -> subprocess.CompletedProcess:
    """Calls a script of the project, as in "python resnet50_test.py --epochs 1".

    Args:
        tree: the project's folder.
        command: `VARIABLE=value` may stand before it.
        folder: the present one of the process.
        options: of subprocess.run.
    """
    words = shlex.split(command)
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VENV")}
    own |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        own[name] = value
    program = sys.executable if words[0] == "python" else words[0]
    return subprocess.run(
        [program, str(tree / words[1]), *words[2:]], cwd=folder, env=own, **options
    )


def write_data(folder: Path) -> None:
    """`pictures/` with train and test of three classes, `texts/train.csv` and `texts/test.csv`."""
    for split, number in (("train", 32), ("test", 10)):
        for label, name in enumerate(CLASSES):
            rng = np.random.default_rng([label, number])
            place = folder / "pictures" / split / name
            place.mkdir(parents=True)
            for index in range(number):
                pixels = rng.integers(0, 160, (16, 16, 3), dtype=np.uint8)
                pixels[..., label] += 60
                Image.fromarray(pixels).save(place / f"{index:02}.png")
    (folder / "texts").mkdir()
    for split, number in (("train", 96), ("test", 30)):
        rng = np.random.default_rng(number)
        with open(folder / "texts" / f"{split}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["class", "text"])
            for index in range(number):
                name = CLASSES[index % 3]
                words = rng.choice(["a", "the", "some", "runs", "sleeps", "eats", name, name], 9)
                rows.writerow([name, " ".join(words[: rng.integers(3, 10)])])
