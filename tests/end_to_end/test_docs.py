"""The README and docs/: every command and Python block runs, every flag and key is explained.

Commands run as they stand in a folder that looks like a clone, with flags that shorten them and
local data, of which the built-in sets have a part; ImageNet weights come from torchvision's cache,
where the test has put some. Curves are drawn of three runs only.
"""

import contextlib
import csv
import functools
import importlib
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

import resnet50_test
import transformer_test
from tuning.flags import OF_TRIALS, TuningFlags, for_trials
from tuning.search import Search
from utils.data.images import shapes
from utils.data.texts import headlines
from utils.errors import UserError
from utils.launch import launcher as launch
from utils.models.resnet import ResNet
from utils.optim.schedules import SCHEDULES
from utils.runs.advice import phase_advice
from utils.settings.aliases import SHORT_FOR
from utils.settings.config import ALIASES, INVOCATION_ONLY, fields, parse
from utils.training.progress import NOTABLE, PHASES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENTRIES = {"resnet50_test.py": resnet50_test, "transformer_test.py": transformer_test}
SHORT = "--max_steps 2 --threads 1 --device cpu --bs 4 --subset 40"
SMALL = {
    "resnet50_test.py": "--depth 18 --width 4 --bs 20",
    "transformer_test.py": "--layers 1 --dim 16 --heads 2 --ffn 16 --bs 20",
}
OWN_DATA = ("imagefolder", "--dataset csv")
BUILT_IN = {"resnet50_test.py": "shapes", "transformer_test.py": "headlines"}
SIDE = "96"  # of pictures, in place of 224: the smallest multiple of 32 with the same stem
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
    "--pretrained runs/my_": "weights from runs/my_",
    "--on_bad skip": "1 bad row left out",
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


def run(command: str) -> Result:
    """`python resnet50_test.py --depth 18`, say, in this process."""
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


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder that looks like a clone, with pictures and a run in it; the present one."""
    folder = tmp_path_factory.mktemp("clone with spaces ä")
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
        for data, train, test in ((shapes, 20, 4), (headlines, 50, 10)):
            patch.setattr(data, "TRAIN_PER_CLASS", train)
            patch.setattr(data, "TEST_PER_CLASS", test)
        for split, count in (("train", 30), ("test", 6)):
            _pictures(Path("my_pictures", split), count)
        _pictures(Path("one_folder"), 30)
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
        yield folder


def _pictures(folder: Path, count: int) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            _picture(folder / name / f"{number}.png", label)


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


# ---- the commands -----------------------------------------------------------------------------


# Before the commands, some of which train these runs further: an export is made once only.
@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks(workplace, block, capsys):
    if "onnx" in block:
        run_folder = re.search(r"runs/\w+", block)[0]
        entry, new = _USES[run_folder]
        _run_entry(workplace, f"python {entry} --resume {run_folder} --export onnx")
        assert run(f"python {entry} --resume {run_folder} --predict {new}").code == 0
    exec(compile(block.replace("224", SIDE), "docs", "exec"), {})
    said = capsys.readouterr().out
    if "onnx" in block:  # the same answers as --predict's
        lines = Path(run_folder, "predictions.csv").read_text(encoding="utf-8").splitlines()
        answers = list(csv.DictReader(lines))
        assert len(answers) == len(said.splitlines())
        for answer, line in zip(answers, said.splitlines(), strict=True):
            name, probability = line.split()
            expected = answer.get("probability", answer.get(name))
            assert answer["class"] == name
            assert float(expected) == pytest.approx(float(probability), abs=0.01)
    words = ("cat", "dog", "money", "sport", "% of 6", "100 of 100 right")
    assert any(word in said for word in words)


# Run -> its entry, and the file that the page's block on ONNX takes.
_USES = {
    "runs/my_run": ("resnet50_test.py", "new_pictures/1.jpg"),
    "runs/my_texts": ("transformer_test.py", "new_texts.txt"),
}


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands(workplace, block):
    for line in filter(None, map(str.strip, block.splitlines())):
        # The pages name a checkpoint and a folder of their own.
        command = re.sub(r"step-\d{8}", newest("runs/my_run").name, line)
        if command.startswith("python ") and command.split()[1] in ENTRIES:
            _run_entry(workplace, command)
        elif "bash run_distributed.sh" in command:
            _prepare_launch(command)
        elif command.startswith("bash tuning/"):
            _prepare_search(command)
        elif command.startswith("cp "):
            subprocess.run(shlex.split(command), check=True)
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


def _prepare_launch(command: str) -> None:
    """All but the launch itself; what that does is tested in tests/distributed/."""
    variables, _, arguments = command.partition("bash run_distributed.sh")
    environ = dict(word.split("=") for word in variables.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(sys.path))
        patch.setattr("sys.argv", list(sys.argv))
        job, plan, _ = launch.prepare(shlex.split(arguments), environ)
    assert job.folder is not None
    assert plan.max_nodes == int(environ.get("NNODES", "1").rpartition(":")[2])


def _prepare_search(command: str) -> None:
    """All but the trials; what these do is tested in tests/tuning/."""
    name = re.match(r"bash tuning/(\w+)\.sh ", command)[1]
    program = importlib.import_module(f"tuning.{name}")
    flags = for_trials(shlex.split(command)[2:])
    settings, origin = parse(program.Settings, flags, "")
    settings.output = f"studies/{len(list(Path('studies').glob('*')))}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        Search(program.TARGET, settings, origin, signals=None).console.close()
    assert "tuning lr" in said.getvalue() or "--params" in command


@functools.cache  # a command that stands on two pages runs once
def _run_entry(workplace: Path, command: str) -> None:
    if "--help" in command:
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, check=True)
        assert "usage:" in done.stdout
        return
    shutil.rmtree(workplace / "runs" / "mine", ignore_errors=True)
    before = set(Path("runs").iterdir())
    with pytest.MonkeyPatch.context() as patch:  # half a second for each, the confusions as well
        patch.setattr("utils.runs.summary.draw_curves", lambda *_: None)
        patch.setattr("utils.reporting.classes._picture", lambda *_: b"")
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


def shortened(command: str, output: str = "runs/mine") -> str:
    """A command that takes a second or two, and leaves alone what others go on with."""
    entry = command.split()[1]
    if any(flag in command for flag in ("--eval_only", "--predict", "--export")):
        return command
    if "--resume" in command:  # one step more; its settings are those of the run
        found = re.search(r"--resume (runs/\w+)", command)
        if found is None or "--" not in command.partition("--resume")[2]:
            return command
        return f"{command} --max_steps {int(newest(found[1]).name[5:]) + 1}"
    command = re.sub(r"--output runs/my_\w+", f"--output {output}", command)
    command = command.replace("--image_size 224", f"--image_size {SIDE}")
    short = SHORT.replace("steps 2", "steps 3") if "--profile" in command else SHORT
    whole = entry == "resnet50_test.py" and ("my_run" in command or "--pretrained" in command)
    if not whole and output != "runs/my_run":
        short += f" {SMALL[entry]}"
    own = any(data in command for data in OWN_DATA) or whole
    local = "" if own else f"--dataset {BUILT_IN[entry]}"
    if "--batch_tokens" in command:
        short = re.sub(r"--bs \d+", "", short)
    return f"{command} {local} {short}"


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


# ---- what the pages say -------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_flag_stands_in_the_page_of_flags(entry, capsys):
    with pytest.raises(SystemExit):
        ENTRIES[entry].main(["--help"])
    listed = re.findall(r"^ {2}(-.*)", capsys.readouterr().out, re.M)
    flags = {flag for line in listed for flag in re.findall(r"(?<![\w-])--?[a-z]\w*", line)}
    assert len(flags) > 90
    assert flags - {"-h", "--help"} <= coded(text("docs/flags.md"))


def test_flags_that_are_named_exist():
    own = {name for entry in ENTRIES.values() for name in fields(entry.Settings)}
    own |= {*fields(TuningFlags), *OF_TRIALS}
    known = own | {f"no_{name}" for name in own} | set(ALIASES) | set(SHORT_FOR)
    foreign = {"help", "shm-size", "logdir"}  # docker's, TensorBoard's
    foreign |= {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "requeue"}  # Slurm's
    foreign |= {"pid"}  # py-spy's
    # Those of the benchmarks.
    foreign |= {"only", "repetitions", "jobs", "train_samples", "variant", "plot", "alphas"}
    foreign |= {"tuning_seeds", "flags", "json", "steps"}
    for page in PAGES:
        if page.name == "measurements.md":  # names flags of the benchmarks
            continue
        named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8"))
        assert {name for name in named if name.replace("-", "_") not in known} <= foreign, page


def test_what_differs_for_texts():
    """Defaults of flags that both entries have; the data set differs by its nature."""
    pictures, texts = (fields(entry.Settings) for entry in ENTRIES.values())
    table = text("docs/flags.md").split("Of the common flags these differ")[1].split("\n## ")[0]
    told = re.findall(r"^\| `--(\w+)` \| `?(\w+)`? by default \(pictures: `?(\w+)`?\)", table, re.M)
    differ = {
        name for name in pictures.keys() & texts if pictures[name].default != texts[name].default
    }
    assert {name for name, *_ in told} == differ - {"dataset"}
    for name, of_texts, of_pictures in told:
        assert (of_texts, of_pictures) == (str(texts[name].default), str(pictures[name].default))


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.name)
def test_recipes(recipe):
    """Each can be read by one of the programs, and is named in the README or by `make`."""
    settings = [entry.Settings for entry in ENTRIES.values()]
    fits = []
    for config_class in settings:
        with contextlib.suppress(UserError):
            parse(config_class, ["--config", str(recipe)], "")
            fits.append(config_class)
    assert len(fits) == 1
    assert f"recipes/{recipe.name}" in text("README.md") + (ROOT / "Makefile").read_text()


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
    kinds = {"free": set(), "evaluation": set()}
    for entry in ENTRIES.values():
        for name, field in fields(entry.Settings).items():
            kinds.get(field.metadata["resume"], set()).add(name)
    assert set.union(*told[:-1]) == kinds["free"] - set(INVOCATION_ONLY) | {"output", "profile"}
    assert told[-1] == kinds["evaluation"]


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

    settings = resnet50_test.Settings(
        dataset="imagefolder", eval_every=1, optimizer="ngd", mixup="meta"
    )
    for phase, advice in phase_advice(settings, Run(), Loader()).items():
        (helps,) = [cells[2] for cells in table if cells[0] == f"`{phase}`"]
        assert set(re.findall(r"--\w+", advice)) <= coded(helps), phase


@pytest.fixture(scope="module")
def full_run(workplace) -> Path:
    """A run that leaves all it can but what wandb does."""
    entry = "python resnet50_test.py"
    flags = "--dataset shapes --val_fraction 0.1 --ema_decay 0.9 --report --profile"
    flags += " --meta_learning --meta_every 1 --log_clean_accuracy --output runs/full"
    assert run(f"{entry} {flags} {SHORT} {SMALL['resnet50_test.py']} --max_steps 3").code == 0
    assert run(f"{entry} --resume runs/full --export safetensors").code == 0
    assert run(f"{entry} --resume runs/full --predict new_pictures").code == 0
    return Path("runs/full")


def test_files(full_run):
    told = {cells[0].strip("`").split("/")[0] for cells in rows("docs/run_folder.md")[2:]}
    assert told == {path.name for path in full_run.iterdir()} | {"wandb", "tokenizer.json"}
    checkpoint = rows("docs/run_folder.md", "## A checkpoint")[2:]
    told = {cells[0].strip("`") for cells in checkpoint}
    assert told == {path.name for path in newest("runs/full").iterdir()}
    for name in ("per_class.csv", "confusion.csv", "confusion.png"):
        assert (full_run / "report" / name).is_file() and name in text("docs/run_folder.md")


def test_files_of_runs_on_texts(workplace):
    command = "python transformer_test.py --resume runs/my_texts"
    assert run(f"{command} --export safetensors").code == 0
    assert run(f"{command} --predict new_texts.csv").code == 0
    told = {cells[0].strip("`"): cells[1] for cells in rows("docs/run_folder.md")[2:]}
    exported = {path.name for path in Path("runs/my_texts/export").iterdir()}
    assert Path("runs/my_texts/tokenizer.json").is_file() and "tokenizer.json" in told
    assert "tokenizer.json" in exported and exported <= coded(told["export/"])
    with Path("runs/my_texts/predictions.csv").open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    assert ",".join(columns) in text("docs/text.md")
    assert columns[:3] == re.search(r"`(line,text,class)`", told["predictions.csv"])[1].split(",")


def test_keys_of_the_summary(full_run):
    folders = (full_run, Path("runs/my_texts"))
    summaries = [json.loads((f / "summary.json").read_text(encoding="utf-8")) for f in folders]
    table = rows("docs/run_folder.md", "## summary.json")[2:]
    assert set().union(*summaries) == {key for cells in table for key in coded(cells[0])}
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
    for target in re.findall(r"`make ([\w-]+)", readme):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_make_demo_tuning(tmp_path):
    """In a copy, as a study that is there already would be gone on with."""
    for name in (*ENTRIES, "utils", "recipes", "tuning", "Makefile", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    result = subprocess.run(
        ["make", "demo-tuning", f"VENV={environment}"], cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("recipe: runs/demo-tuning-") == 2
    assert result.stdout.count("\nrank  trial") == 2


@pytest.mark.slow
@pytest.mark.parametrize("target", ["demo", "demo-text"])
def test_make_demo(target):
    """The whole demo, in the environment of these tests."""
    environment = Path(sys.prefix)
    (environment / ".installed").touch()
    result = subprocess.run(
        ["make", target, f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", result.stdout).group(1))
    assert accuracy >= 95
