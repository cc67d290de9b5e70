"""Every command and Python block of the README and docs/ runs, and makes the files that the pages
describe. Curves are drawn for three runs only.
"""

import contextlib
import csv
import functools
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from clone_of_pages import SHORT, SIDE, SMALL, clone, newest, run, shortened
from matplotlib.figure import Figure
from pages import ENTRIES, PROJECT, ROOT, blocks, coded, rows, text

from tuning.entry import target_of
from tuning.flags import for_trials
from tuning.search import Search
from utils.launch import launcher as launch
from utils.models.resnet import ResNet
from utils.settings.config import parse
from utils.start.command import main as train
from utils.training.hardware import FIGURES
from utils.training.times import PHASES

pytestmark = pytest.mark.slow

# Output of a command with this flag; the others train, and print their accuracy.
SAID = {
    "--dry_run": "dry run: no run was kept",
    "--predict": "predictions: ",
    "--export onnx": "export/model.onnx: graph valid",
    "--export safetensors": "export/model.safetensors: read back",
    "--eval_only": "test accuracy",
    "--eval_data": " samples of ",
}
SAID_BESIDES = {
    "--profile": "trace.json.gz",
    "--val_fraction": "best on the validation split",
    "--model convnext_tiny --pretrained": "head of 1000 classes replaced by one of 2",
    "--pretrained imagenet": "head of 1000 classes replaced by one of 2",
    "--pretrained runs/my_": "weights from runs/my_",
    "--on_bad skip": "1 bad row left out",
}
# Files of a training run, always or with this flag.
LEFT = {
    "": "report/per_class.csv",
    "--profile": "trace.json.gz",
    "--wandb": "wandb/run_id",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone with spaces ä")
    with clone(folder):
        yield folder


# Before the commands, some of which train these runs further: an export is made only once.
# tests/test_python_api.py has the page on Python.
@pytest.mark.parametrize(
    "block", [one for one in blocks("python") if not one.id.startswith("docs/python.md")]
)
def test_python_blocks_run(workplace, block, capsys):
    if "onnx" in block:
        run_folder = re.search(r"runs/\w+", block)[0]
        entry, new = _USES[run_folder]
        _run_entry(workplace, f"python {entry} --resume {run_folder} --export onnx")
        assert run(f"python {entry} --resume {run_folder} --predict {new}").code == 0
    exec(compile(block.replace("224", SIDE), "docs", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    if "onnx" in block:  # the same answers as --predict's
        lines = Path(run_folder, "predictions.csv").read_text(encoding="utf-8-sig").splitlines()
        answers = list(csv.DictReader(lines))
        assert len(answers) == len(said.splitlines())
        for answer, line in zip(answers, said.splitlines(), strict=True):
            name, probability = line.split()
            assert answer["predicted"] == name
            assert float(answer["probability"]) == pytest.approx(float(probability), abs=0.01)
    words = (
        "cat",
        "dog",
        "money",
        "sport",
        "% of 6",
        "100 of 100 right",
        "cost 0.5",
        "False, True]",
    )
    words += ("macro F1",)
    assert any(word in said for word in words)


# Run -> its entry, and the file that the block on ONNX takes.
_USES = {
    "runs/my_run": ("resnet50_test.py", "new_pictures/1.jpg"),
    "runs/my_texts": ("transformer_test.py", "new_texts.txt"),
}


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_run(workplace, block):
    for line in filter(None, map(str.strip, block.splitlines())):
        # The pages name their own checkpoint and folder.
        command = re.sub(r"step-\d{8}", newest("runs/my_run").name, line)
        if command.startswith("python ") and command.split()[1] in ENTRIES:
            _run_entry(workplace, command)
        elif command.startswith("python train.py "):
            short = ["--max_steps", "1", "--threads", "1", "--device", "cpu", "--workers", "0"]
            assert train([*shlex.split(command)[2:], *short], "") == 0
        elif "bash run_distributed.sh" in command:
            _prepare_launch(command)
        elif command.startswith("bash tuning/"):
            _prepare_search(command)
        elif command.startswith("cp "):
            subprocess.run(shlex.split(command), check=True)
        elif command.startswith("python -m "):
            subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
        elif command.startswith("make "):
            subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True)
        elif command.startswith("pip install "):
            listed = text("requirements-dev.txt")
            for package in shlex.split(command)[2:]:
                if package.startswith("."):  # this project, with some of its extras
                    extras = PROJECT["optional-dependencies"]
                    assert {*re.findall(r"\w+", package)} <= {*extras}
                    continue
                assert re.search(rf"^{package}>=", listed, re.M), package
        elif command.startswith("cd runs/"):
            subprocess.run(["bash", "-c", command], check=True)
        elif command.startswith("tensorboard "):
            assert importlib.util.find_spec("tensorboard") and command.endswith("--logdir runs")
            assert list(Path("runs/my_run/tensorboard").glob("events.*"))
        else:
            assert command == "source .venv/bin/activate"


def _prepare_launch(command: str) -> None:
    """All but the launch itself, which tests/distributed/ tests."""
    variables, _, arguments = command.partition("bash run_distributed.sh")
    environ = dict(word.split("=") for word in variables.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(sys.path))
        patch.setattr("sys.argv", list(sys.argv))
        job, plan, _ = launch.prepare(shlex.split(arguments), environ)
    assert (job.folder is not None) != job.checks
    assert plan.max_nodes == int(environ.get("NNODES", "1").rpartition(":")[2])


def _prepare_search(command: str) -> None:
    """All but the trials, which tests/tuning/ tests."""
    target = target_of(re.match(r"bash tuning/(\w+)_tuning\.sh ", command)[1])
    flags = for_trials(shlex.split(command)[2:])
    settings, origin = parse(target.search_class, flags, "")
    settings.output = f"studies/{len(list(Path('studies').glob('*')))}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        Search(target, settings, origin, signals=None).console.close()
    assert "tuning lr" in said.getvalue() or "--params" in command


@functools.cache  # a command on two pages runs once
def _run_entry(workplace: Path, command: str) -> None:
    if "--help" in command:
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, check=True)
        assert "usage:" in done.stdout
        return
    if "--model list" in command:
        assert "vit_base_patch16_224" in run(command).out
        return
    shutil.rmtree(workplace / "runs" / "mine", ignore_errors=True)
    before = set(Path("runs").iterdir())
    with pytest.MonkeyPatch.context() as patch:  # each takes half a second
        patch.setattr("utils.runs.report.draw_curves", lambda *_: None)
        patch.setattr("utils.reporting.classes.draw_confusions", lambda *_: Figure())
        result = run(shortened(command))
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


@pytest.fixture(scope="module")
def full_run(workplace) -> Path:
    """A run with all files that there can be, except those of wandb."""
    entry = "python resnet50_test.py"
    flags = "--dataset shapes --val_fraction 0.1 --ema_decay 0.9 --profile --eval_views shift"
    flags += " --meta_learning --meta_every 1 --log_clean_accuracy --output runs/full"
    with pytest.MonkeyPatch.context() as patch:
        # It is too short for labels_to_check.csv.
        patch.setattr("utils.runs.report.spare_seconds", lambda trainer: 1e9)
        assert run(f"{entry} {flags} {SHORT} {SMALL['resnet50_test.py']} --max_steps 3").code == 0
    assert run(f"{entry} --resume runs/full --export safetensors").code == 0
    assert run(f"{entry} --resume runs/full --predict new_pictures").code == 0
    return Path("runs/full")


def test_files_of_a_run_are_documented(full_run):
    told = {cells[0].strip("`").split("/")[0] for cells in rows("docs/run_folder.md")[2:]}
    assert told == {path.name for path in full_run.iterdir()} | {
        "wandb",
        "mlflow_run_id",
        "tokenizer.json",
    }
    checkpoint = rows("docs/run_folder.md", "## A checkpoint")[2:]
    told = {cells[0].strip("`") for cells in checkpoint}
    assert told == {path.name for path in newest("runs/full").iterdir()}
    for name in ("per_class.csv", "confusion.csv", "confusion.png"):
        assert (full_run / "report" / name).is_file() and name in text("docs/run_folder.md")


def test_files_of_a_run_on_texts_are_documented(workplace):
    command = "python transformer_test.py --resume runs/my_texts"
    assert run(f"{command} --export safetensors").code == 0
    assert run(f"{command} --predict new_texts.csv").code == 0
    told = {cells[0].strip("`"): cells[1] for cells in rows("docs/run_folder.md")[2:]}
    exported = {path.name for path in Path("runs/my_texts/export").iterdir()}
    assert Path("runs/my_texts/tokenizer.json").is_file() and "tokenizer.json" in told
    assert "tokenizer.json" in exported and exported <= coded(told["export/"])
    with Path("runs/my_texts/predictions.csv").open(encoding="utf-8-sig") as file:
        columns = next(csv.reader(file))
    assert ",".join(columns) in text("docs/text.md")
    assert set(columns[:4]) <= coded(told["predictions.csv"])


def test_keys_of_the_summary_are_documented(full_run):
    folders = (full_run, Path("runs/my_texts"))
    summaries = [json.loads((f / "summary.json").read_text(encoding="utf-8")) for f in folders]
    table = rows("docs/run_folder.md", "## summary.json")[2:]
    local = {"local_workers", "sync_rule", "averagings", "sent_of_ddp"}  # with --strategy local
    told = {key for cells in table for key in coded(cells[0])}
    assert set().union(*summaries) == told - local and local <= told
    assert coded(table[0][1]) >= {"finished", "stopped_early", "interrupted"}


def test_keys_of_the_metrics_are_documented(full_run):
    lines = [json.loads(line) for line in (full_run / "metrics.jsonl").read_text().splitlines()]
    part = text("docs/run_folder.md").split("## metrics.jsonl")[1].split("```")[0]
    keys = {key for line in lines for key in line}
    assert keys | {"event", "time_share"} <= coded(part)
    assert {*PHASES, "other"} <= coded(part)
    shares = [line["time_share"] for line in lines if "time_share" in line]
    assert shares and all(set(share) == {*PHASES, "other"} for share in shares)
    table = rows("docs/run_folder.md", "## metrics.jsonl")[2:]
    others = {"model", "best", "steps", "gap", "strength"}  # the last two of --mixup auto
    others |= {*FIGURES, "total_steps", "eval_every"}  # of a GPU; of --time_budget
    assert {key for cells in table for key in coded(cells[1])} - keys <= others
