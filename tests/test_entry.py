"""A third entry: with settings, a model and a name alone it can do what the other two can."""

import json
import sys
from dataclasses import dataclass

import pytest
from PIL import Image
from quick_runs import handlers_put_back, quick

import transformer_test
from tests import third_entry
from tuning import entry as tuning_entry
from utils.entry import Entry, lost_peer_line, print_lines, run_entry
from utils.launch import launcher
from utils.settings import TrainSettings

FLAGS = "--dataset shapes -b 50 --device cpu --log_every 4 --fused none --lr 0.01"
WHOLE = {
    "settings": third_entry.Settings,
    "build_model": third_entry.build_model,
    "model_name": third_entry.model_name,
    "text": third_entry.__doc__,
}


@dataclass
class NoKind(TrainSettings):
    entry = "no_kind.py"


@pytest.fixture
def run(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*flags) -> int:
        with handlers_put_back():
            return third_entry.main([str(flag) for flag in flags])

    return run


def test_a_third_entry_trains_resumes_and_is_used(run, tmp_path, capsys):
    flags = [*FLAGS.split(), "--output", "first"]
    assert run(*flags, "--epochs", 1) == 0
    assert run("--resume", "first", "--epochs", 2) == 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert (summary["model"], summary["entry"]) == ("perceptron8", "third_entry.py")
    assert (summary["epochs"], summary["steps"]) == (2, 24)
    assert run("--resume", "first", "--eval_only") == 0

    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    assert run("--resume", "first", "--predict", "black.png") == 0
    assert len((tmp_path / "first" / "predictions.csv").read_text().splitlines()) == 2
    assert run("--resume", "first", "--export", "safetensors") == 0
    assert (tmp_path / "first" / "export" / "model.safetensors").stat().st_size

    capsys.readouterr()
    more = ["--epochs", 1, "--pretrained", "first", "--freeze_backbone"]
    assert run(*FLAGS.split(), "--output", "second", *more) == 0
    assert "weights from first, step 24" in capsys.readouterr().out
    assert run(*flags[:-1], "third", "--hidden", 4, *more) == 2
    assert "give weights of the same architecture" in capsys.readouterr().err
    assert run(*flags[:-1], "fourth", "--pretrained", "imagenet") == 2
    assert (
        "no weights are published for perceptron8; give a run or a file" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"build_model": lambda settings: None}, r"build_model .* with \(settings, card\)"),
        ({"model_name": lambda: "name"}, r"model_name .* with \(settings\)"),
        ({"settings": type("Settings", (third_entry.Settings,), {})}, "@dataclass .* `entry`"),
        ({"settings": NoKind}, "ImageSettings or TextSettings"),
    ],
)
def test_what_an_entry_lacks_is_said_when_it_is_imported(changed, said):
    Entry(**WHOLE)
    with pytest.raises(TypeError, match=said):
        Entry(**WHOLE | changed)


def test_functions_of_an_entry_may_have_further_arguments_with_defaults():
    Entry(**WHOLE | {"build_model": lambda settings, card, depth=2, *, wide=False: None})


def test_help_of_an_entry_without_a_docstring_shows_its_name(capsys):
    with handlers_put_back(), pytest.raises(SystemExit):
        Entry(**WHOLE | {"text": None}).main(["--help"])
    assert "\nthird_entry.py\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "flag", "goes_on"),
    [
        (third_entry, "--train_file", ": it belongs to transformer_test.py"),
        (transformer_test, "--img_size", ": it belongs to resnet50_test.py and vit_test.py"),
        (third_entry, "--hiden", ", did you mean --hidden?"),
        (third_entry, "--qqqq", "; see --help"),
    ],
)
def test_an_unknown_flag_that_another_entry_has(capsys, entry, flag, goes_on):
    with handlers_put_back():
        assert run_entry(entry.Settings, None, "", [flag, "3"]) == 2
    assert capsys.readouterr().err == f"error: unknown flag {flag}{goes_on}\n"


def test_a_lost_process_is_told_with_the_cause():
    """Perhaps nobody is gone: an interface of GLOO_SOCKET_IFNAME may not exist."""
    line = lost_peer_line(1, RuntimeError("Unable to find address for: eth9\nmore"))
    assert line.startswith("rank 1: ") and line.endswith(": Unable to find address for: eth9")
    assert lost_peer_line(0, RuntimeError()).endswith(": RuntimeError")


def without(module: str):
    """What Python raises where it is not installed."""

    def fail(*_):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    return fail


@pytest.mark.parametrize(
    ("module", "package", "call"),
    [
        ("torch.nn", "torch", lambda fail: run_entry(third_entry.Settings, fail, "", [])),
        ("PIL", "pillow", lambda fail: print_lines(fail)),
        ("torch", "torch", lambda fail: tuning_entry.main(["resnet50", "--dataset", "shapes"])),
        ("torch", "torch", lambda fail: launcher.main(["resnet50_test.py"])),
    ],
    ids=["entry", "list", "tuning", "launcher"],
)
def test_a_missing_package_is_a_line_with_the_command(
    capsys, monkeypatch, tmp_path, module, package, call
):
    monkeypatch.chdir(tmp_path)
    fail = without(module)
    monkeypatch.setattr("tuning.search.Search", fail)
    monkeypatch.setattr(launcher, "prepare", fail)
    with handlers_put_back():
        assert call(fail) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {package} is not installed: ")
    assert error.endswith("python -m pip install -r requirements.txt\n")
    assert error.count("\n") == 1


def test_a_missing_optional_package_is_a_line_with_its_own_command(capsys):
    with handlers_put_back():
        assert run_entry(third_entry.Settings, without("pyarrow.parquet"), "", []) == 2
    line = "error: pyarrow is not installed: python -m pip install pyarrow\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("flags", "noted"),
    [("", True), ("--dry_run", False), ("--check", False), ("--epochs 1 --report", True)],
)
def test_a_run_without_matplotlib_says_so_at_its_start(capsys, monkeypatch, flags, noted):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # then it is not found
    with handlers_put_back():
        assert run_entry(third_entry.Settings, lambda *_: None, "", flags.split()) == 0
    note = "note: plots are left out, as matplotlib is not installed: pip install matplotlib\n"
    assert (note in capsys.readouterr().out) is noted


def test_a_search_without_optuna_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with handlers_put_back():
        assert tuning_entry.main(["resnet50", "--dataset", "shapes"]) == 2
    assert capsys.readouterr().err == "error: tuning needs one more package: pip install optuna\n"


def test_another_module_that_is_missing_is_a_bug():
    with handlers_put_back(), pytest.raises(ModuleNotFoundError, match="nothing"):
        run_entry(third_entry.Settings, without("utils.nothing"), "", [])
