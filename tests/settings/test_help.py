"""--help, and how the entry reports a user's mistakes."""

import signal

import pytest
import torch
from settings_of_pictures import FIELDS

from resnet50_test import main


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_documented(name):
    meta = FIELDS[name].metadata
    assert meta["help"] and meta["group"] and not meta["help"].endswith(".")
    assert meta["resume"] in ("fixed", "free", "evaluation")
    if FIELDS[name].type in (int, float, int | None, float | None) and not meta["choices"]:
        assert any(meta[end] is not None for end in ("low", "above", "high", "below"))


def test_help_lists_all_settings_and_imports_little(run_entry_script):
    result = run_entry_script(["--help"], env={"PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "100"})
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
