"""What the tests of image folders share."""

import pytest
from picture_trees import make_tree

from utils.data import decode as decode_module


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
