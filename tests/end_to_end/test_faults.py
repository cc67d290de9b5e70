"""A mistake or fault is reported in one line with exit code 2, and nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from resnet50_test import main
from utils.reporting.plots import draw_curves

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).parents[2]
TINY = [
    "--depth", "18", "--width", "4", "--device", "cpu", "--threads", "1", "--bs", "16",
    "--log_every", "2", "--eval_every", "0",
]  # fmt: skip
SHAPES = ["--dataset", "shapes", "--subset", "100", "--max_steps", "4", *TINY]


def picture(path: Path, label: int, size=(12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(path))).integers(0, 100, (*size, 3)) + 100 * label
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def tree(root: Path, classes=("cat", "dog"), train=8, test=3) -> Path:
    for split, count in (("train", train), ("test", test)):
        for label, name in enumerate(classes):
            for number in range(count):
                picture(root / split / name / f"{number}.png", label)
    return root


FOLDER = ["--dataset", "imagefolder", "--image_size", "16", "--max_steps", "2", *TINY]


def test_faults_of_the_data_are_told_before_weights_are_fetched(monkeypatch, capsys):
    def fetch(*_, **__):
        raise AssertionError("weights were fetched")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fetch)
    (tree(Path("pictures")) / "test" / "owl").mkdir()
    words = [*FOLDER, "--width", "64", "--stem", "imagenet", "--pretrained", "imagenet"]
    assert main([*words, "--data_dir", "pictures"]) == 2
    assert "'owl'" in capsys.readouterr().err


def test_a_run_works(monkeypatch):
    monkeypatch.setattr("utils.runs.report.draw_curves", draw_curves)
    assert main([*SHAPES, "--output", "run"]) == 0
    assert Path("run/curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 4
    assert summary["test_samples"] == 100 and 0 <= summary["test_accuracy"] <= 100
    for key in [
        "entry", "model", "dataset", "optimizer", "mixup", "epochs", "train_samples",
        "train_loss", "train_accuracy", "test_loss", "seconds_total", "seconds_training",
        "samples_per_second", "peak_memory_bytes", "world_size", "global_batch_size", "device",
        "precision", "threads", "torch_version", "seed",
    ]:  # fmt: skip
        assert summary[key] is not None, key
    assert sorted(os.listdir("run")) == [
        ".lock", "checkpoints", "config.yaml", "curves.png", "evaluated.csv", "log.txt",
        "metrics.jsonl", "report", "report.html", "splits.csv", "summary.json", "tensorboard",
    ]  # fmt: skip


def test_config_yaml_is_a_recipe(capfd):
    assert main([*SHAPES, "--output", "one"]) == 0
    assert main(["--config", "one/config.yaml", "--output", "two"]) == 0
    one, two = (Path(f"{n}/checkpoints/step-00000004/model.safetensors") for n in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert "optimizer: sgd  # default" in Path("one/config.yaml").read_text()
    assert "subset: 100.0  # command line" in Path("one/config.yaml").read_text()


def test_a_folder_that_has_a_run_is_refused(fails):
    assert main([*SHAPES, "--output", "run"]) == 0
    said = fails(*SHAPES, "-n", "run")
    assert "already holds a run: resume it with --resume run" in said and "--output run-2" in said


def test_another_number_of_steps_than_the_data_make_is_refused(fails):
    said = fails(*SHAPES, "--steps_per_epoch", "5000", "--output", "run")
    assert "--steps_per_epoch 5000: the data make " in said and "; leave the flag out, or" in said
    assert not Path("run").exists()


def test_a_name_that_is_too_long_is_one_line(fails):
    long = "x" * 300
    assert f"{long}: File name too long" in fails(*SHAPES, "--output", long)
    assert f"{long}: File name too long" in fails("--resume", long)


def test_a_run_of_another_script_is_named(fails):
    Path("run").mkdir()
    Path("run/config.yaml").write_text("# transformer_test.py\nepochs: 1\n")
    assert "a run of transformer_test.py; give that script" in fails("--resume", "run")


def test_a_schedule_that_would_run_backwards_is_refused(fails):
    scaled = [*SHAPES, "--lr", "0.1", "--lr_base_size", "1024", "--output", "run"]
    assert "--min_lr 0.01 is above this learning rate, 0.001563" in fails(*scaled, "--min_lr", 0.01)
    warmup = ["--warmup_steps", 2, "--warmup_lr", 0.05]
    assert "--warmup_lr 0.05 is above this learning rate" in fails(*scaled, *warmup)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--mixup", "0.2", "--mixup_off_epoch", 5],
            "--mixup_off_epoch 5 is not reached in 4 step",
        ),
        (["--sched", "step", "--step_epochs", 50], "the learning rate never falls: --sched step"),
        (["--sched", "multistep", "--milestones", "60,70"], "first lowers it after 60 epochs"),
    ],
)
def test_what_is_not_reached_is_noted(run, flags, line):
    code, out, _ = run(*SHAPES, *flags, "--epochs", 10, "--output", "run")
    assert code == 0 and "note: " in out and line in out


def test_the_table_of_earlier_predictions_may_lie_beside_the_pictures(run):
    assert run(*SHAPES, "--output", "run")[0] == 0
    picture(Path("mine/0.png"), 0)
    for _ in range(2):
        code, out, _ = run("--resume", "run", "--predict", "mine", "--predictions", "mine/p.csv")
        assert code == 0 and "1 predictions: mine/p.csv" in out


def test_a_folder_in_use_is_refused(fails):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import "
         "Path; from utils.reporting.run_folder import RunFolder; r = RunFolder(Path('run')); "
         "print('held', flush=True); sys.stdin.read()", ROOT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    assert "another run is using this folder" in fails(*SHAPES, "--output", "run")
    holder.communicate(b"")


def test_an_output_that_cannot_be_written_is_refused(fails, tmp_path):
    Path("file").write_text("")
    assert "file is a file, not a folder" in fails(*SHAPES, "--output", "file/run")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk]).returncode == 0:
        try:
            line = fails(*SHAPES, "--output", disk / "run")
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
        assert "Read-only file system; choose a folder that can be written" in line


def test_a_missing_network_is_reported(fails, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    line = fails("--data_dir", "empty", *TINY)
    for flag in ("--data_dir", "--dataset imagefolder", "--dataset shapes"):
        assert flag in line
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_broken_archive_is_reported(fails):
    Path("data").mkdir()
    Path("data/cifar-10-python.tar.gz").write_bytes(b"not an archive")
    line = fails(*TINY)
    for part in ("cifar-10-python.tar.gz", "--data_dir", "--dataset imagefolder", "shapes"):
        assert part in line


@pytest.mark.parametrize(
    "case, expected",
    [
        ("absent", "pictures"),
        ("empty", "pictures"),
        ("one class", "class"),
        ("empty class", "fox"),
        ("not a picture", "notes.png"),
        ("truncated", "9.png"),
        ("unknown test class", "fox"),
    ],
)
def test_unsuitable_folders_are_refused(fails, case, expected):
    root = Path("pictures")
    if case == "empty":
        root.mkdir()
    elif case == "one class":
        tree(root, classes=("cat",))
    elif case != "absent":
        tree(root)
    if case == "empty class":
        (root / "train" / "fox").mkdir()
    elif case == "not a picture":
        (root / "train" / "cat" / "notes.png").write_text("no picture")
    elif case == "truncated":
        content = (root / "train" / "cat" / "0.png").read_bytes()
        (root / "train" / "cat" / "9.png").write_bytes(content[: len(content) // 2])
    elif case == "unknown test class":
        picture(root / "test" / "fox" / "0.png", 1)
    assert expected in fails(*FOLDER, "--data_dir", root)


def test_bad_files_are_skipped_and_counted():
    root = tree(Path("pictures"))
    (root / "train" / "cat" / "bad.png").write_text("no picture")
    assert main([*FOLDER, "--data_dir", str(root), "--on_bad", "skip", "--output", "run"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["skipped_files"] == 1


def test_val_is_the_test_set_or_with_a_flag_the_validation_split(capfd, fails):
    root = tree(Path("pictures"))
    folder = [*FOLDER, "--eval_every", "1", "--data_dir", str(root)]
    assert "does not have" in fails(*folder, "--val_is_validation")
    (root / "test").rename(root / "val")
    (root / "train" / "cat" / "notes.txt").write_text("no picture")
    assert main([*folder, "--output", "run"]) == 0
    out = capfd.readouterr().out
    assert "note: val/ is used as the test set" in out and "test accuracy" in out
    assert "note: 1 file passed over, which are no pictures by their names: " in out
    more = ["--max_steps", "9", "--early_stop_patience", "3", "--output", "other"]
    assert "--val_is_validation, which uses val/" in fails(*folder, *more)
    more.append("--val_is_validation")
    assert main([*folder, *more]) == 0
    out = capfd.readouterr().out
    assert (
        "note: val/" not in out
        and " 6 validation pictures of 2 classes" in out
        and "validation accuracy" in out
    )
    summary = json.loads(Path("other/summary.json").read_text())
    assert "best_val_accuracy" in summary and summary["test_accuracy"] is None
    assert main(["--resume", "other", "--eval_only"]) == 0
    assert "validation accuracy" in capfd.readouterr().out
    assert "no effect" in fails(*folder, "--val_is_validation", "--flip_test")


def test_changed_data_is_refused_on_resume(fails):
    root = tree(Path("pictures"))
    assert main([*FOLDER, "--data_dir", str(root), "--output", "run"]) == 0
    assert main(["--resume", "run", "--max_steps", "3", "--epochs", "9"]) == 0
    picture(root / "train" / "dog" / "0.png", 0)
    line = fails("--resume", "run", "--max_steps", "4", "--epochs", "9")
    assert "these are not the data that the run in run was trained on" in line
    line = fails("--resume", "run", "--eval_only")
    assert line.endswith("or evaluate on other data by --resume run --eval_data PATH")
    assert main(["--config", "run/config.yaml", "--pretrained", "run", "--eval_only"]) == 0


@pytest.mark.parametrize(
    "flags, name",
    [(["--depth", "34"], "--depth 34"), (["--seed", "3"], "--seed 3"), (["--bs", "8"], "batch")],
)
def test_changes_of_fixed_settings_are_refused_by_name(fails, flags, name):
    assert main([*SHAPES, "--output", "run"]) == 0
    line = fails("--resume", "run", *flags)
    assert name in line and "must keep it" in line


def test_a_run_may_be_resumed_into_another_folder():
    assert main([*SHAPES, "--output", "run"]) == 0
    assert main(["--resume", "run", "--output", "other", "--max_steps", "6"]) == 0
    lines = Path("other/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and {2, 4, 6} <= set(steps)
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 4


def test_resume_without_a_value_takes_the_newest(capfd):
    assert main(SHAPES) == 0
    (run,) = Path("runs").iterdir()
    assert main(["--resume", "--max_steps", "5"]) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 5


def test_a_kill_during_the_report_loses_no_part_of_it(monkeypatch):
    """The summary, which marks a run as finished, is written last."""
    import utils.runs.report

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(utils.runs.report, "draw_curves", killed)
        main([*SHAPES, "--output", "run"])
    assert main(["--resume", "run"]) == 0
    assert Path("run/curves.png").exists() and Path("run/summary.json").exists()


def test_resume_that_asks_for_less_changes_nothing(fails, capfd):
    assert main([*SHAPES, "--output", "run"]) == 0
    config = Path("run/config.yaml").read_text()
    less = fails("--resume", "run", "--max_steps", "3", "--output", "other")
    assert "has done 4 steps and --max_steps asks for 3" in less
    assert less.endswith("raise --max_steps, or leave --resume out to start a new run")
    assert not Path("other").exists()
    shutil.copytree("run/checkpoints/step-00000004", "run/checkpoints/step-00000002")
    less = fails("--resume", "run", "--max_steps", "3")
    assert "(--resume run/checkpoints/step-00000002 --output FOLDER), or" in less
    shutil.rmtree("run/checkpoints/step-00000002")
    assert main(["--resume", "run", "--epochs", "7"]) == 0
    assert "to train longer give a larger --max_steps" in capfd.readouterr().out
    assert Path("run/config.yaml").read_text() == config
    assert main(["--resume", "run", "--max_steps", "none", "--epochs", "1"]) == 0
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 7
    assert "subset: 100.0  # command line" in Path("run/config.yaml").read_text()


def test_evaluation_elsewhere_may_differ_in_device_batch_and_precision(capfd):
    assert main([*SHAPES, "--output", "run"]) == 0
    accuracy = json.loads(Path("run/summary.json").read_text())["test_accuracy"]
    capfd.readouterr()
    assert main(["--resume", "run", "--eval_only", "--bs", "100", "--device", "auto"]) == 0
    assert f"test accuracy {accuracy:.2f} %" in capfd.readouterr().out


def test_why_a_run_ended_is_in_its_log(fails):
    line = fails(*SHAPES, "--lr", "1e30", "--output", "run")
    assert line.removeprefix("error: ") in Path("run/log.txt").read_text()


def test_summary_is_valid_json_whatever_the_loss(capfd):
    assert main([*SHAPES, "--lr", "1e18", "--max_steps", "1", "--output", "run"]) == 0

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(Path("run/summary.json").read_text(), parse_constant=refuse)
    for line in Path("run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_the_command_line_wins_over_a_recipe():
    Path("recipe.yaml").write_text("warmup_epochs: 2\nmomentum: 0.95\n")
    flags = ["--config", "recipe.yaml", "--warmup_steps", "1", "--optimizer", "adamw"]
    assert main([*SHAPES, *flags, "--output", "run"]) == 0


def test_resume_without_a_run_is_refused(fails):
    assert "there is no run of resnet50_test.py" in fails("--resume")
    assert "no such folder" in fails("--resume", "nowhere")
    assert main([*SHAPES, "--output", "run"]) == 0
    Path("run/checkpoints/foo").mkdir()
    assert "foo" in fails("--resume", "run/checkpoints/foo")
    assert "--resume RUN" in fails("--eval_only")


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(capfd):
    assert main([*SHAPES, "--output", "run", "--save_every", "1"]) == 0
    newest = Path("run/checkpoints/step-00000004")
    (newest / "state.json").write_text("{}")
    assert main(["--resume", "run"]) == 0
    assert "step-00000004 is damaged (state.json" in capfd.readouterr().out
    shutil.rmtree("run/checkpoints/step-00000002")
    for path in Path("run/checkpoints").iterdir():
        (path / "model.safetensors").unlink()
    assert main(["--resume", "run"]) == 2


def test_a_loss_that_is_not_finite_is_reported(fails):
    line = fails(*SHAPES, "--lr", "1e30", "--output", "run")
    assert (
        "is not finite" in line
        and "(1e+30; take a lower --lr" in line
        and "--on_nonfinite skip" in line
    )


@pytest.mark.slow
def test_names_may_have_spaces_and_any_letters():
    root = tree(Path("Bilder von Müllers Katze"), classes=("Kätzchen", "犬 dog"))
    result = subprocess.run(
        [sys.executable, ROOT / "resnet50_test.py", *FOLDER, "--data_dir", root, "--output",
         "Läufe 1/犬"],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert Path("Läufe 1/犬/summary.json").exists()


def test_wrong_flags_exit_before_pytorch_is_imported():
    for flags in (["--lrr", "1"], ["--lr", "fast"], ["--width", "0"], ["--device", "tpu"]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", ROOT / "resnet50_test.py", *flags],
            capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 2
        assert "| torch" not in result.stderr
        said = [line for line in result.stderr.splitlines() if not line.startswith("import time")]
        assert len(said) == 1 and said[0].startswith("error: ")


@pytest.mark.parametrize(
    "flags",
    [
        ["--subset", "5"],
        ["--subset", "99999"],
        ["--subset", "2.5"],
        ["--crop_padding", "40"],
        ["--cutout", "40"],
        ["--stem", "imagenet", "--bs", "1"],
        ["--resume", "absent/checkpoints/foo"],
        ["--image_size", "4"],
        ["--warmup_epochs", "99"],
        ["--save_every", "soon"],
        ["--betas", "0.9", "--optimizer", "adamw"],
        ["--config", "absent.yaml"],
    ],
)
def test_unsuitable_values_are_refused(fails, flags):
    assert fails("--dataset", "shapes", *TINY, *flags)
