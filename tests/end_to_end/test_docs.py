"""The README and docs/: every command and Python block runs, every flag and key is explained.

Commands run as they stand in a folder that looks like a clone, with flags that shorten them and
local data; ImageNet weights come from torchvision's cache, where the test has put some.
"""

import contextlib
import functools
import importlib.util
import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from resnet50_test import Settings, main
from utils.advice import phase_advice
from utils.aliases import SHORT_FOR
from utils.config import ALIASES, OF_ONE_START, fields
from utils.models.resnet import ResNet
from utils.optim.schedules import SCHEDULES
from utils.training.progress import NOTABLE, PHASES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = "--max_steps 2 --threads 1 --device cpu --bs 4 --subset 40"
SMALL = "--depth 18 --width 4 --bs 20"
# What a command with this flag says; the others train, and say their accuracy.
SAID = {
    "--dry_run": "dry run: nothing was kept",
    "--predict": "predictions: ",
    "--export onnx": "export/model.onnx: graph valid",
    "--export safetensors": "export/model.safetensors: read back",
    "--eval_only": "test accuracy",
}
SAID_BESIDES = {
    "--report": "worst classes",
    "--profile": "trace.json.gz",
    "--val_fraction": "best on the validation split",
    "--pretrained imagenet": "head of 1000 classes replaced by one of 2",
}
# What training leaves in its folder, always or with this flag.
LEFT = {
    "": "summary.json",
    "--report": "report/per_class.csv",
    "--profile": "trace.json.gz",
    "--wandb": "wandb/run_id",
}


def text(page: str) -> str:
    """A page, its broken lines of commands joined."""
    return re.sub(r" \\\n +", " ", (ROOT / page).read_text(encoding="utf-8"))


def blocks(language: str) -> list:
    """(page, text) of each code block, as parameters of a test."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for block in re.findall(rf"^```{language}\n(.*?)^```", text(name), re.M | re.S):
            found.append(pytest.param(block, id=f"{name}:{block.splitlines()[0][:60]}"))
    return found


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The cells of the tables below a heading (or the title), up to the next heading."""
    content = text(page)
    if heading:
        content = content.split(f"\n{heading}\n")[1]
    lines = [line for line in content.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def coded(content: str) -> set[str]:
    """The words in `code`."""
    return {word for code in re.findall(r"`([^`\n]+)`", content) for word in code.split()}


@dataclass
class Result:
    code: int
    out: str
    err: str


def run(arguments: list[str]) -> Result:
    """The entry, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder that looks like a clone, with pictures and a run in it; the present one."""
    folder = tmp_path_factory.mktemp("clone with spaces ä")
    for name in ("resnet50_test.py", "utils", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    url = torchvision.models.get_model_weights("resnet18").DEFAULT.url
    cached = folder / "torch" / "hub" / "checkpoints" / url.rpartition("/")[2]
    cached.parent.mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TORCH_HOME", str(folder / "torch"))
        for split, count in (("train", 30), ("test", 6)):
            _pictures(Path("my_pictures", split), count)
        _pictures(Path("one_folder"), 30)
        (folder / "new_pictures").mkdir()
        _picture(Path("new_pictures/1.jpg"), 0)
        _picture(Path("new_pictures/2.png"), 1)
        command = next(line for line in text("docs/pictures.md").splitlines() if "my_run" in line)
        result = run([*shlex.split(command)[2:], *SHORT.split()])
        assert result.code == 0, result.err
        yield folder


def _pictures(folder: Path, count: int) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            _picture(folder / name / f"{number}.png", label)


def _picture(path: Path, label: int) -> None:
    rng = np.random.default_rng(len(str(path)))
    Image.fromarray((rng.integers(0, 128, (40, 50, 3)) + 100 * label).astype(np.uint8)).save(path)


def newest(run_folder: str) -> Path:
    return sorted(Path(run_folder, "checkpoints").glob("step-*"))[-1]


# ---- the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands(workplace, block):
    for line in filter(None, map(str.strip, block.splitlines())):
        # The pages name a checkpoint and a folder of their own.
        command = re.sub(r"step-\d{8}", newest("runs/my_run").name, line)
        if command.startswith("python resnet50_test.py"):
            _run_entry(workplace, command)
        elif command.startswith("make "):
            subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True)
        elif command.startswith("pip install "):
            listed = text("requirements-dev.txt")
            for package in command.split()[2:]:
                assert re.search(rf"^{package}>=", listed, re.M), package
        elif command.startswith("cd runs/"):
            subprocess.run(["bash", "-c", command], check=True)
        elif command.startswith("tensorboard "):
            assert importlib.util.find_spec("tensorboard") and command.endswith("--logdir runs")
            assert list(Path("runs/my_run/tensorboard").glob("events.*"))
        else:
            assert command == "source .venv/bin/activate"


@functools.cache  # a command that stands on two pages runs once
def _run_entry(workplace: Path, command: str) -> None:
    if "--help" in command:
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, check=True)
        assert "usage:" in done.stdout
        return
    shutil.rmtree(workplace / "runs" / "mine", ignore_errors=True)
    before = set(Path("runs").iterdir())
    result = run(shlex.split(shortened(command))[2:])
    assert result.code == 0, f"{command}\n{result.err}"
    assert "error" not in result.err and "Warning" not in result.err
    said = [words for flag, words in SAID.items() if flag in command] or ["test accuracy"]
    if "--resume" not in command and "--dry_run" not in command:
        said += [words for flag, words in SAID_BESIDES.items() if flag in command]
        (made,) = set(Path("runs").iterdir()) - before
        for flag, name in LEFT.items():
            assert flag not in command or (made / name).is_file(), name
    for words in said:
        assert words in result.out, f"{command}\n{result.out}"
    written = re.search(r"--predictions (\S+)", command)
    assert written is None or Path(written[1]).is_file()


def shortened(command: str) -> str:
    if any(flag in command for flag in ("--eval_only", "--predict", "--export")):
        return command
    if "--resume" in command:  # one step more; its settings are those of the run
        found = re.search(r"--resume (runs/\w+)", command)
        if found is None or "--" not in command.partition("--resume")[2]:
            return command
        return f"{command} --max_steps {int(newest(found[1]).name[5:]) + 1}"
    command = command.replace("--output runs/my_run", "--output runs/mine")
    short = SHORT.replace("steps 2", "steps 3") if "--profile" in command else SHORT
    own_weights = "my_run" in command or "--pretrained" in command
    local = "" if "imagefolder" in command or own_weights else "--dataset shapes"
    return f"{command} {local} {short} {'' if own_weights else SMALL}"


def test_cifar_stem_in_torchvision():
    model = torchvision.models.resnet18(num_classes=3)
    changes = re.findall(r"`(model\.\w+ = [^`]+)`", text("docs/run_folder.md"))
    assert len(changes) == 2
    exec("\n".join(changes), {"model": model, "torch": torch})
    ours = ResNet(18, 3, 64, "cifar").eval()
    model.load_state_dict(ours.state_dict())
    pictures = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(pictures), ours(pictures))


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks(workplace, block, capsys):
    if "onnx" in block:
        assert run(["--resume", "runs/my_run", "--export", "onnx"]).code == 0
        assert run(["--resume", "runs/my_run", "--predict", "new_pictures/1.jpg"]).code == 0
    exec(compile(block, "docs", "exec"), {})
    said = capsys.readouterr().out
    if "onnx" in block:  # the same answer as --predict's
        name, probability = said.split()
        answer = Path("runs/my_run/predictions.csv").read_text().splitlines()
        assert answer[0] == "file,class,probability"
        path, expected, value = answer[1].split(",")
        assert (path, expected) == ("new_pictures/1.jpg", name)
        assert float(value) == pytest.approx(float(probability), abs=0.01)
    assert any(words in said for words in ("cat", "dog", "% of 6", "100 of 100 right"))


# ---- what the pages say -------------------------------------------------------------------------


def test_every_flag_stands_in_the_page_of_flags(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^ {2}(-.*)", capsys.readouterr().out, re.M)
    flags = {flag for line in listed for flag in re.findall(r"(?<![\w-])--?[a-z]\w*", line)}
    assert len(flags) > 90
    assert flags - {"-h", "--help"} <= coded(text("docs/flags.md"))


def test_flags_that_are_named_exist():
    known = set(fields(Settings)) | set(ALIASES) | set(SHORT_FOR)
    known |= {f"no_{name}" for name in fields(Settings)}
    foreign = {"help", "shm-size", "logdir"}  # docker's, TensorBoard's
    foreign |= {"only", "repetitions", "jobs", "train_samples", "variant"}  # the benchmarks'
    for page in PAGES:
        if page.name == "measurements.md":  # names flags of the benchmarks
            continue
        named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8"))
        assert {name for name in named if name.replace("-", "_") not in known} <= foreign, page


def test_aliases():
    told = {
        alias.lstrip("-"): cells[0].strip("`-")
        for cells in rows("docs/flags.md", "## Names from timm and torchvision")[2:]
        for alias in re.findall(r"`([^`]+)`", cells[1])
    }
    assert told == ALIASES


def test_schedules():
    table = rows("docs/flags.md", "## Optimizer and learning rate")
    table = table[next(i for i, cells in enumerate(table) if cells[0] == "`--sched`") + 2 :]
    told = {cells[0].strip("`"): set(re.findall(r"--(\w+)", cells[2])) for cells in table}
    assert told == {name: set(own) - {"warmup"} for name, own in SCHEDULES.items()}


def test_what_a_resumed_run_may_change():
    table = rows("docs/resume.md", "## What may change")[2:]
    told = [set(re.findall(r"--(\w+)", cells[1])) for cells in table]
    free = {name for name, field in fields(Settings).items() if field.metadata["resume"] == "free"}
    assert set.union(*told[:-1]) == free - set(OF_ONE_START) | {"output", "profile"}
    metadata = {name: field.metadata["resume"] for name, field in fields(Settings).items()}
    assert told[-1] == {name for name, kind in metadata.items() if kind == "evaluation"}


def test_advice_on_time():
    table = rows("docs/slow.md", "## Where does the time go?")[2:]
    told = {cells[0].strip("`"): float(cells[1].removesuffix(" %")) / 100 for cells in table}
    assert told == NOTABLE

    @dataclass
    class Run:
        precision = type("Precision", (), {"name": "bf16"})
        device = torch.device("cuda")

    class Loader:
        workers = 0

    settings = Settings(dataset="imagefolder", eval_every=1, optimizer="ngd", mixup="meta")
    for phase, advice in phase_advice(settings, Run(), Loader()).items():
        (helps,) = [cells[2] for cells in table if cells[0] == f"`{phase}`"]
        assert set(re.findall(r"--\w+", advice)) <= coded(helps), phase


@pytest.fixture(scope="module")
def full_run(workplace) -> Path:
    """A run that leaves all it can but what wandb does."""
    flags = "--dataset shapes --val_fraction 0.1 --ema_decay 0.9 --report --profile"
    flags += " --meta_learning --meta_every 1 --log_clean_accuracy"
    assert run([*f"{flags} --output runs/full {SHORT} {SMALL} --max_steps 3".split()]).code == 0
    assert run(["--resume", "runs/full", "--export", "safetensors"]).code == 0
    assert run(["--resume", "runs/full", "--predict", "new_pictures"]).code == 0
    return Path("runs/full")


def test_files(full_run):
    told = {cells[0].strip("`").split("/")[0] for cells in rows("docs/run_folder.md")[2:]}
    assert told == {path.name for path in full_run.iterdir()} | {"wandb"}
    checkpoint = rows("docs/run_folder.md", "## A checkpoint")[2:]
    told = {cells[0].strip("`") for cells in checkpoint}
    assert told == {path.name for path in newest("runs/full").iterdir()}
    for name in ("per_class.csv", "confusion.csv", "confusion.png"):
        assert (full_run / "report" / name).is_file() and name in text("docs/run_folder.md")


def test_keys_of_the_summary(full_run):
    summary = json.loads((full_run / "summary.json").read_text(encoding="utf-8"))
    table = rows("docs/run_folder.md", "## summary.json")[2:]
    assert set(summary) == {key for cells in table for key in coded(cells[0])}
    assert coded(table[0][1]) >= {"finished", "stopped_early", "interrupted"}


def test_keys_of_the_metrics(full_run):
    lines = [json.loads(line) for line in (full_run / "metrics.jsonl").read_text().splitlines()]
    part = text("docs/run_folder.md").split("## metrics.jsonl")[1].split("```")[0]
    keys = {key for line in lines for key in line}
    assert keys | {"event", "time_share"} <= coded(part)
    assert {*PHASES, "other"} <= coded(part)
    shares = [line["time_share"] for line in lines if "time_share" in line]
    assert shares and all(set(share) == {*PHASES, "other"} for share in shares)
    table = rows("docs/run_folder.md", "## metrics.jsonl")[2:]
    assert {key for cells in table for key in coded(cells[1])} - keys <= {"model", "best", "steps"}


def test_links_and_names_of_files():
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        for name in re.findall(r"\]\((?!http)([^)#]+)\)", content):
            assert (page.parent / name).exists(), f"{page}: {name}"
        for name in re.findall(r"`((?:utils|recipes|docs|tests)/[\w/.]+)`", content):
            assert (ROOT / name).exists(), f"{page}: {name}"
    readme = text("README.md")
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in readme
    for target in re.findall(r"`make (\w+)", readme):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_make_demo(tmp_path):
    """The whole demo, in the environment of these tests."""
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    result = subprocess.run(
        ["make", "demo", f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", result.stdout).group(1))
    assert accuracy >= 95
