"""Lines on what is lost of pictures, and on pictures that are in two splits."""

import shutil

import numpy as np
import pytest
from picture_trees import load, noise
from PIL import Image, ImageDraw

from utils.data.images import notes
from utils.data.images.image_data import Form
from utils.errors import UserError

BOTH = pytest.mark.parametrize("decode", ["once", "always"])


def fill(root, picture, splits=("train", "test"), ending="png"):
    """Four pictures of each class: picture(number)."""
    shutil.rmtree(root, ignore_errors=True)
    for number in range(8 * len(splits)):
        folder = root / splits[number // 8] / ("cat", "dog")[number // 4 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.{ending}")
    return root


def notes_of(tree, decode, **form):
    return list(load(tree, decode=decode, image_size=16, form=Form(**form)).notes)


def icon(number, colour=(0, 0, 0)):
    alpha = Image.new("L", (16, 16))
    ImageDraw.Draw(alpha).ellipse((2, 2, 5 + number % 8, 10), fill=255)
    image = Image.new("RGB", (16, 16), colour)
    image.putalpha(alpha)
    return image


@BOTH
def test_shapes_in_transparency_alone_are_seen_or_named(tmp_path, decode):
    tree = fill(tmp_path / "set", icon, ["train"])
    shutil.copytree(tree / "train", tree / "test")
    for number, path in enumerate(sorted((tree / "test").rglob("*.png"))):
        Image.fromarray(noise(16, number)).save(path)
    assert notes_of(tree, decode) == []
    for form in ({"transparency": "dropped"}, {"transparency": "black"}):
        (note,) = notes_of(tree, decode, **form)
        assert note.startswith(
            "8 of 8 training pictures that were looked at come out of one colour"
        )
        assert "train/cat/0.png: " in note and "if they are transparent, see --transparency" in note
    white = fill(tmp_path / "white", lambda number: icon(number, (255,) * 3), ["train"])
    shutil.copytree(tree / "test", white / "test")
    (note,) = notes_of(white, decode)
    assert "come out of one colour" in note
    assert notes_of(white, decode, transparency="black") == []


@BOTH
def test_few_of_16_bits(tmp_path, decode):
    tree = fill(
        tmp_path / "set",
        lambda number: Image.fromarray(noise(16, number)[..., 0].astype(np.uint16) * 16),
    )
    note, *_ = notes_of(tree, decode)
    assert "come out of one colour" in note and "--white_level is the largest of these" in note
    assert notes_of(tree, decode, white_level=4095) == []


@BOTH
def test_pictures_that_are_all_alike(tmp_path, decode):
    tree = fill(tmp_path / "set", lambda number: Image.fromarray(noise(16)))
    first, second = notes_of(tree, decode)
    assert first.startswith("7 of 8 training pictures that were looked at come out the same")
    assert second.startswith("8 of 8 test pictures are training pictures, too, which flatters")
    tree = fill(tmp_path / "blank", lambda number: Image.new("RGB", (16, 16), (number, 9, 9)))
    assert notes_of(tree, decode)[0].endswith("else look at them")


@BOTH
def test_sides_that_the_crop_loses(tmp_path, decode):
    def wide(number):
        return Image.fromarray(np.hstack([noise(16, 2 * number), noise(16, 2 * number + 1)]))

    tree = fill(tmp_path / "set", wide)
    (note,) = notes_of(tree, decode)
    assert "sides of 2.0 to 1 or more, and lose 50 % or more" in note
    assert notes_of(tree, decode, resize_mode="squash") == []


@BOTH
def test_test_pictures_that_are_training_pictures(tree, decode, monkeypatch):
    shutil.copy(tree / "train" / "cat" / "001.png", tree / "test" / "dog" / "zz.png")
    said = f"1 of 9 test pictures are training pictures, too, which flatters the figures: {tree}"
    (note,) = load(tree, decode=decode).notes
    assert note == f"{said}/test/dog/zz.png = {tree}/train/cat/001.png"
    monkeypatch.setattr(notes, "_on_looks", None)  # what was found is kept
    assert load(tree, decode=decode).notes == [note]


@BOTH
def test_copies_that_a_fraction_divides(tree, decode):
    shutil.rmtree(tree / "test")
    for path in list(tree.rglob("*.png")):
        shutil.copy(path, path.with_name(f"copy of {path.name}"))
    (note,) = load(tree, decode=decode, test_fraction=0.5).notes
    assert " of 8 test pictures are training pictures, too" in note


def test_names_without_bad_files(tree):
    """Numbers of pictures and of files differ."""
    (tree / "train" / "cat" / "000.png").write_text("no picture")
    shutil.copy(tree / "train" / "dog" / "001.png", tree / "test" / "dog" / "zz.png")
    left_out, note = load(tree, on_bad="skip").notes
    assert left_out.startswith("left out by --on_bad skip: ") and "cat/000.png: not an" in left_out
    assert note.endswith(f"{tree}/test/dog/zz.png = {tree}/train/dog/001.png")
    with pytest.raises(UserError, match=r"000\.png"):
        load(tree)
