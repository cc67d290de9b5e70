"""Files of settings, and folders of runs."""

import functools

import pytest
import yaml

from resnet50_test import Settings
from utils.settings.config import parse, to_yaml


@pytest.fixture
def write(tmp_path):
    def write(content, name="settings.yaml"):
        path = tmp_path / name
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@functools.cache
def _written(*argv: str) -> str:
    """The config.yaml of a run with these flags."""
    settings, origin = parse(Settings, [*argv], "")
    return f"# {Settings.entry}\n{to_yaml(settings, origin)}"


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """make_run(flags) -> the folder of a run that was started with these flags."""
    monkeypatch.chdir(tmp_path)

    def make(*argv):
        folder = tmp_path / "runs" / "ä run"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(_written(*map(str, argv)), encoding="utf-8")
        return folder

    return make
