"""A folder that looks like a clone, in which the commands of the documentation run.

They run as they stand, with flags that shorten them and local data, of which the built-in sets have
a part; ImageNet weights come from torchvision's cache, where the test has put some.
"""

import contextlib
import io
import json
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from pages import ENTRIES, ROOT, text
from PIL import Image
from safetensors.torch import save_file

from utils.data.images import shapes
from utils.data.texts import headlines

SHORT = "--max_steps 2 --threads 1 --device cpu --bs 4 --subset 40"
SMALL = {
    "resnet50_test.py": "--depth 18 --width 4 --bs 20",
    "transformer_test.py": "--layers 1 --dim 16 --heads 2 --ffn 16 --bs 20",
    "vit_test.py": "--layers 1 --dim 16 --heads 2 --ffn 16 --bs 20",
}
SMALL_MODELS = {"convnext_tiny": "test_convnext"}  # of timm
OWN_DATA = ("imagefolder", "--dataset csv", "--dataset tar")
BUILT_IN = {
    "resnet50_test.py": "shapes",
    "transformer_test.py": "headlines",
    "vit_test.py": "shapes",
}
SIDE = "96"  # of pictures, in place of 224: the smallest multiple of 32 with the same stem


@dataclass
class Result:
    code: int
    out: str
    err: str


def run(command: str) -> Result:
    """Runs a command such as `python resnet50_test.py --depth 18` in this process."""
    _, entry, *arguments = shlex.split(command)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = ENTRIES[entry].main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def clone(folder: Path):
    """Makes `folder` look like a clone, with pictures and a run, and the working directory."""
    for name in (*ENTRIES, "utils", "recipes", "tuning"):
        (folder / name).symlink_to(ROOT / name)
    url = torchvision.models.get_model_weights("resnet18").DEFAULT.url
    cached = folder / "torch" / "hub" / "checkpoints" / url.rpartition("/")[2]
    cached.parent.mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TORCH_HOME", str(folder / "torch"))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        _published_weights(folder / "hub", "test_convnext")
        for page, file in ("docs/vit.md", "my_net.py"), ("docs/extending.md", "mine.py"):
            Path(file).write_text(text(page).split(f"```\n# {file}\n")[1].split("```")[0])
        for data, train, test in ((shapes, 20, 4), (headlines, 50, 10)):
            patch.setattr(data, "TRAIN_PER_CLASS", train)
            patch.setattr(data, "TEST_PER_CLASS", test)
        for split, count in (("train", 30), ("test", 6)):
            _pictures(Path("my_pictures", split), count)
            _list(Path("my_pictures"), split)
        Path("corrected.csv").write_text("file,label\ntest/cat/0.png,dog\n")
        _pictures(Path("one_folder"), 30)
        Path("copies").mkdir()
        for name in ("imagenet", "copies/my_pictures"):
            Path(name).symlink_to(folder / "my_pictures")
        rows = {"train": [], "test": []}
        for i in range(64):
            split = "train" if i < 60 else "test"
            Path(f"cassava/{split}_images").mkdir(parents=True, exist_ok=True)
            _picture(Path(f"cassava/{split}_images/{i}.jpg"), i % 2)
            rows[split].append(f"{i}.jpg,{i % 2}\n")
        for name, split in (("train", "train"), ("sample_submission", "test")):
            Path(f"cassava/{name}.csv").write_text("".join(["image_id,label\n", *rows[split]]))
        (folder / "new_pictures").mkdir()
        _picture(Path("new_pictures/1.jpg"), 0)
        _picture(Path("new_pictures/2.png"), 1)
        _texts()
        recipe = Path("runs/tuning-resnet50-cifar10/best.yaml")
        recipe.parent.mkdir(parents=True)
        recipe.write_text("lr: 0.2\nepochs: 50\nlabel_smoothing: 0.05\n")
        for page, name in (("pictures", "my_run"), ("text", "my_texts")):
            lines = text(f"docs/{page}.md").splitlines()
            command = next(line for line in lines if f"--output runs/{name}" in line)
            result = run(f"{shortened(command, f'runs/{name}')}")
            assert result.code == 0, result.err
        yield


def _published_weights(cache: Path, name: str) -> None:
    """Puts weights for a model of timm where its published ones would be."""
    repository = timm.get_pretrained_cfg(name).hf_hub_id.replace("/", "--")
    place = cache / f"models--{repository}" / "snapshots" / "1"
    place.mkdir(parents=True)
    save_file(timm.create_model(name).state_dict(), place / "model.safetensors")
    (cache / f"models--{repository}" / "refs").mkdir()
    (cache / f"models--{repository}" / "refs" / "main").write_text("1")


def _pictures(folder: Path, count: int) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            _picture(folder / name / f"{number}.png", label)


def _list(folder: Path, split: str) -> None:
    files = sorted(folder.glob(f"{split}/*/*.png"))
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in files]
    (folder / f"{split}.csv").write_text("\n".join(["file,label", *rows]))


def _picture(path: Path, label: int) -> None:
    rng = np.random.default_rng(len(str(path)))
    Image.fromarray((rng.integers(0, 128, (40, 50, 3)) + 100 * label).astype(np.uint8)).save(path)


def _texts() -> None:
    """The files that docs/text.md names. One row of messy.tsv has a column too few."""
    rng = np.random.default_rng(0)
    words = {
        "sport": ["match", "goal", "team", "coach", "final"],
        "money": ["bank", "share", "price", "oil", "tax"],
    }
    rows = [
        (topic, *(" ".join(rng.choice(own, length)) for length in (3, 8)))
        for _ in range(30)
        for topic, own in words.items()
    ]
    lines = [f'{topic},"{title}","{body}"' for topic, title, body in rows]
    for name, part in (("my_texts", lines), ("train", lines[:40]), ("val", lines[40:50]),
                       ("test", lines[50:])):  # fmt: skip
        Path(f"{name}.csv").write_text("\n".join(["topic,title,body", *part]) + "\n")
    lines = [json.dumps({"label": topic, "text": body}) for topic, _, body in rows]
    Path("my_texts.jsonl").write_text("\n".join(lines))
    lines = [f"{number}\t{body}\t{topic}" for number, (topic, _, body) in enumerate(rows)]
    Path("messy.tsv").write_text("\n".join(["id\tbody\ttopic", *lines, "60\tno topic"]) + "\n")
    Path("new_texts.csv").write_text('title,body\n"The match","a goal"\n"The bank","the price"\n')
    Path("new_texts.txt").write_text("The coach of the team\nA tax on oil\n")


def newest(run_folder: str) -> Path:
    return sorted(Path(run_folder, "checkpoints").glob("step-*"))[-1]


def shortened(command: str, output: str = "runs/mine") -> str:
    """The command, changed to take a second or two and not to disturb other commands' runs."""
    entry = command.split()[1]
    if any(flag in command for flag in ("--eval_only", "--eval_data", "--predict", "--export")):
        return command
    if "--resume" in command:  # one step more; its settings are those of the run
        found = re.search(r"--resume (runs/\w+)", command)
        if found is None or "--" not in command.partition("--resume")[2]:
            return command
        return f"{command} --max_steps {int(newest(found[1]).name[5:]) + 1}"
    command = re.sub(r"--output runs/my_\w+", f"--output {output}", command)
    command = command.replace("--image_size 224", f"--image_size {SIDE}")
    command = re.sub(r"--workers \d+", "--workers 1", command)  # each imports PyTorch to resize
    short = SHORT.replace("steps 2", "steps 3") if "--profile" in command else SHORT
    whole = entry == "resnet50_test.py" and ("my_run" in command or "--pretrained" in command)
    for name, small in SMALL_MODELS.items():
        command = command.replace(f"--model {name} ", f"--model {small} ")
    if not whole and output != "runs/my_run" and "--model " not in command:
        short += f" {SMALL[entry]}"
    own = any(data in command for data in OWN_DATA) or whole
    local = "" if own else f"--dataset {BUILT_IN[entry]}"
    if own and entry != "transformer_test.py" and "--workers" not in command:
        short += " --workers 1"
    if "--batch_tokens" in command:
        short = re.sub(r"--bs \d+", "", short)
    return f"{command} {local} {short}"
