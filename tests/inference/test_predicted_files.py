"""Which files --predict reads, and that its output replaces none of them."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from utils.errors import UserError
from utils.inference.predict_pictures import HEADERS, list_pictures
from utils.inference.use_model import check_output, use_model


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """new.csv, and a folder of pictures with other files."""
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text("text\na b\n")
    os.mkdir("pics")
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(f"pics/{name}")
    Path("pics/notes.txt").write_text("about the pictures")
    Path("pics/table.csv").write_bytes(HEADERS[0] + b"p_cat\na.png,cat,0.5,0.5\n")
    Path("pics/old.csv").write_bytes(HEADERS[1] + b"a.png,cat,0.5\n")  # of an earlier version


def refused(source: str, output: str) -> None:
    with pytest.raises(UserError, match="name another file with --predictions"):
        check_output(source, Path(output))


def test_the_output_is_no_file_that_is_read():
    os.symlink("new.csv", "link.csv")
    os.link("new.csv", "hard.csv")
    for output in ("new.csv", "./new.csv", "pics/../new.csv", "link.csv", "hard.csv"):
        refused("new.csv", output)
    refused("link.csv", "new.csv")
    check_output("new.csv", Path("pics/table.csv"))
    Path("texts.csv").write_text("line,text,class\n")
    check_output("pics", Path("texts.csv"), takes_folders=False)  # the folder is refused later
    check_output("absent.csv", Path("new.csv"))  # its absence is found out later


def test_the_output_is_no_file_of_a_folder_of_pictures():
    os.symlink("pics", "link")
    os.symlink("pics/a.png", "picture")
    os.mkdir("elsewhere")
    os.link("pics/b.png", "elsewhere/b.png")
    os.symlink("../elsewhere", "pics/more")
    for source, output in (
        ("pics", "pics/a.png"), ("pics", "pics/notes.txt"), ("link", "pics/a.png"),
        ("pics/", "link/a.png"), ("pics", "picture"), ("pics", "elsewhere/b.png"),
        ("pics/a.png", "picture"),
    ):  # fmt: skip
        refused(source, output)
    for output in ("pics/table.csv", "pics/old.csv", "pics/new.csv", "new.csv"):
        check_output("pics", Path(output))


def test_a_compressed_file_is_not_promised():
    with pytest.raises(UserError, match=r"out\.csv\.gz: .* leave out \.gz"):
        check_output("new.csv", Path("out.csv.gz"))


def test_it_is_refused_before_the_weights_are_loaded():
    settings = SimpleNamespace(
        predict="predictions.csv", predictions=None, export=None, task="texts"
    )
    console = SimpleNamespace(say=print)
    Path("predictions.csv").write_text("line,text,class\n")
    run = SimpleNamespace(settings=settings, console=console, resumed_folder=lambda: Path())
    with pytest.raises(UserError, match=r"replace predictions\.csv"):
        use_model(run, SimpleNamespace(predicts_folders=False), None)


def test_files_that_training_passes_over_are_left_out_of_a_folder():
    Path("pics/c.odd").write_bytes(b"none")
    said = []
    assert list_pictures("pics", said.append) == ["pics/a.png", "pics/b.png"]
    assert said == ["4 other files left out, such as pics/c.odd"]
    assert list_pictures("pics/notes.txt") == ["pics/notes.txt"]  # an error when it is decoded
    os.remove("pics/a.png")
    os.remove("pics/b.png")
    with pytest.raises(UserError, match="no pictures in this folder"):
        list_pictures("pics")
