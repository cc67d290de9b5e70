"""--help, and how the entry reports a user's mistakes."""

import re
import signal
from itertools import chain

import pytest
import torch
from quick_runs import handlers_put_back
from settings_of_pictures import FIELDS

import resnet50_test
import transformer_test
import utils
import vit_test
from resnet50_test import main
from utils.settings.config import fields
from utils.settings.help import FIRST


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_documented(name):
    meta = FIELDS[name].metadata
    assert meta["help"] and meta["group"] and not meta["help"].endswith(".")
    assert meta["resume"] in ("fixed", "free", "evaluation")
    if FIELDS[name].type in (int, float, int | None, float | None) and not meta["choices"]:
        assert any(meta[end] is not None for end in ("low", "above", "high", "below"))


def test_help_lists_all_settings_and_imports_little(run_entry_script):
    result = run_entry_script(
        ["--help", "all"], env={"PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "100"}
    )
    assert result.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "utils.settings.config" in imported
    assert imported.isdisjoint({"torch", "numpy", "tqdm", "matplotlib"})
    # An entry for each setting, with its default.
    entries = ("\n" + result.stdout).split("\n  --")
    for name in FIELDS:
        [entry] = [e for e in entries if e.split()[0].rstrip(",") == name]
        assert "default: " in " ".join(entry.split()), name
    for heading in {field.metadata["group"] for field in FIELDS.values()}:
        assert f"\n{heading}:\n" in result.stdout


def help_of(*words: str, capsys, entry=main) -> str:
    with handlers_put_back(), pytest.raises(SystemExit) as ended:
        entry([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("entry", [main, transformer_test.main, vit_test.main])
def test_help_is_one_screen(entry, capsys):
    text = help_of("--help", capsys=capsys, entry=entry)
    flags = re.findall(r"^  --(\w+)", text, re.M)
    assert 15 < len(flags) < 25 and len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) < 96 and text.count("  python ") >= 4
    assert {"data_dir", "epochs", "resume", "predict"} < {*flags}


def test_every_flag_of_the_first_screen_is_one_of_an_entry():
    of_entries = [fields(module.Settings) for module in (resnet50_test, transformer_test, vit_test)]
    assert {name for flags in FIRST.values() for name in flags} <= {*chain(*of_entries)}


def test_a_word_finds_flags_by_name_alias_and_text(capsys):
    for word, name in (
        ("crop", "crop_padding"), ("--grad-accum-steps", "accumulation_steps"), ("Mirror", "hflip"),
    ):  # fmt: skip
        text = help_of("--help", word, capsys=capsys)
        assert f"\n  --{name} " in text and "\n  --epochs " not in text
        assert f"all {len(FIELDS)} flags" in text
    assert help_of("--help=crop", capsys=capsys) == help_of("-h", "crop", capsys=capsys)
    with handlers_put_back():
        assert main(["--help", "qqq"]) == 2
    assert capsys.readouterr().err.startswith("error: --help qqq: no flag has this word")


def test_version(capsys):
    text = help_of("--epochs", "3", "--version", capsys=capsys)
    assert f" {utils.__version__}, Python 3." in text and text.endswith(
        f"PyTorch {torch.__version__.split('+')[0]}\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--epocs", "3"],
        ["--epochs", "0"],
        ["--optimizer", "adam"],
        ["--config", "nowhere.yaml"],
        ["--config", "unknown_key.yaml"],
        ["--config", "two\nlines.yaml"],
        ["--dataset", "shapes", "--data_dir", "pictures"],
        ["--ngd", "--optimizer", "sgd"],
        ["--resume"],
        ["--dataset", "shapes", "--crop_padding", "32"],  # found once the data is loaded
        pytest.param(
            ["--device", "cuda"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda argv: " ".join(argv).replace("\n", " "),
)
def test_a_users_mistake_is_one_line_and_exit_code_2(argv, tmp_path, monkeypatch, capfd):
    """In a process of its own it is tested by tests/end_to_end/test_faults.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process stay
    (tmp_path / "unknown_key.yaml").write_text("epocs: 3\n")
    files = sorted(tmp_path.iterdir())
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert [p for p in tmp_path.rglob("*") if p.name != "runs"] == files  # no folder is left over
