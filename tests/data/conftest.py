"""What the tests of data sets share."""

import os
from pathlib import Path

import pytest
from data.images.picture_trees import make_tree

from utils.data.images import cifar, mnist
from utils.data.images import decode as decode_module
from utils.data.texts import published_csv
from utils.errors import UserError


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "pictures")


@pytest.fixture
def no_decoding(monkeypatch):
    def refuse():
        def decode(*_):
            raise AssertionError("decoded again")

        monkeypatch.setattr(decode_module, "decode", decode)

    return refuse


@pytest.fixture
def no_network(monkeypatch):
    """Every download of a published data set fails."""

    def refuse(url, path, checksum, *, hint):
        raise UserError(f"cannot download {url}: no network; {hint}")

    for module in (published_csv, cifar, mnist):
        monkeypatch.setattr(module, "download", refuse)


@pytest.fixture
def real_texts():
    """The folder that holds the real ag_news_csv/."""
    folder = Path(os.environ.get("REAL_DATA", "nowhere"))
    if not (folder / "ag_news_csv" / "train.csv").is_file():
        pytest.skip("needs ag_news_csv in the folder of real data that REAL_DATA names")
    return folder
