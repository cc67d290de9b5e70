"""--predict for pictures: probabilities as in evaluation, a CSV file that is complete or absent."""

import csv
import dataclasses
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from toy import CPU, network

from utils.data.images.decode import decode, decode_all
from utils.data.images.image_data import Form
from utils.data.images.loader import ImageLoader
from utils.errors import UserError
from utils.inference.predict_pictures import (
    PictureFiles,
    list_pictures,
    predict_images,
    to_gray,
)
from utils.training.objective import Precision
from utils.weights.card import ModelCard

CLASSES = ("cat", "dog", "emu")
ROOT = Path(__file__).resolve().parents[2]
FORMS = [
    Form(), Form(crop_ratio=0.75, transparency="black"), Form("squash", transparency="dropped"),
    Form("letterbox", white_level=4095),
]  # fmt: skip
CARD = ModelCard(CLASSES, (0.4, 0.5, 0.6), (0.2, 0.3, 0.0), 8, 8, 3)


def noise(seed, height=8, width=8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_pictures(folder, names) -> list[str]:
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(seed)).save(path)
    return list_pictures(folder)


def predicted(paths, output, model=None, card=CARD, on_bad="error", **settings):
    settings = {"batch_size": 2, "precision": Precision("fp32", CPU)} | settings
    model = network() if model is None else model
    files = PictureFiles(paths, card, workers=2, on_bad=on_bad)
    return predict_images(model, files, output_csv=output, **settings), len(files.skipped)


def refused(paths, output, *parts, **settings) -> None:
    with pytest.raises(UserError) as error:
        predicted(paths, output, **settings)
    assert "\n" not in str(error.value)
    for part in parts:
        assert str(part) in str(error.value), error.value
    assert not os.path.lexists(output) and not list(output.parent.glob(".*"))


def rows(path) -> list[list[str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


# ---- the list ---------------------------------------------------------------------------------


def test_list_is_sorted_and_without_hidden_files(tmp_path):
    names = ["b/2.png", "b/10.png", "a/c/1.png", "z.png", ".hidden.png", ".git/x.png"]
    names += ["__MACOSX/y.png"]
    make_pictures(tmp_path, names)
    (tmp_path / "Thumbs.db").write_bytes(b"")
    expected = ["a/c/1.png", "b/10.png", "b/2.png", "z.png"]
    assert list_pictures(tmp_path) == [f"{tmp_path}/{name}" for name in expected]


def test_list_keeps_the_path_as_given(tmp_path, monkeypatch):
    make_pictures(tmp_path, ["in/a.png"])
    monkeypatch.chdir(tmp_path)
    assert list_pictures("in/a.png") == ["in/a.png"]
    assert list_pictures("in/") == list_pictures("in") == ["in/a.png"]
    assert list_pictures("./in/.") == ["./in/./a.png"]


def test_links_are_followed_once(tmp_path):
    make_pictures(tmp_path / "elsewhere", ["a.png"])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    (folder / "broken.png").symlink_to(tmp_path / "absent")
    assert list_pictures(folder) == [f"{folder}/broken.png", f"{folder}/link/a.png"]


def test_nothing_to_list(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        list_pictures(tmp_path / "absent")
    (tmp_path / ".hidden.png").write_bytes(b"")
    with pytest.raises(UserError, match="no pictures in this folder"):
        list_pictures(tmp_path)


def test_formats_that_are_not_read_are_named(tmp_path):
    make_pictures(tmp_path, ["a.png"])
    (tmp_path / "b.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    said = []
    list_pictures(tmp_path, said.append)
    heic = "1 .heic (pip install pi-heif, or convert to JPEG)"
    assert said == [f"1 other file left out, such as {tmp_path}/b.HEIC, {heic}"]


# ---- the numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_probabilities_are_those_of_evaluation(tmp_path, batch_size):
    paths = make_pictures(tmp_path / "in", [f"{i}.png" for i in range(7)])
    model = network(dropout=0.5).train()
    said = []
    result = predicted(paths, tmp_path / "out.csv", model, batch_size=batch_size, say=said.append)
    assert (*result, said) == (7, 0, [])
    images = np.stack([decode(path, 8) for path in paths])
    loader = ImageLoader(
        images, np.zeros(7, np.int64), mean=CARD.mean, std=CARD.std, batch_size=7, device=CPU
    )
    with torch.inference_mode():
        expected = model.eval()(next(loader.epoch()).inputs).softmax(1)
    header, *lines = rows(tmp_path / "out.csv")
    assert header == ["file", "predicted", "probability", *(f"p_{name}" for name in CLASSES)]
    assert [line[0] for line in lines] == paths
    assert [line[1] for line in lines] == [CLASSES[index] for index in expected.argmax(1)]
    for line, probability in zip(lines, expected.max(1).values.tolist(), strict=True):
        assert float(line[2]) == pytest.approx(probability, abs=1e-6)
        assert len(line[2]) == 8  # 0.123456
    found = np.array([line[3:] for line in lines], float)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_code_of_the_page_reads_pictures_as_they_are_predicted(tmp_path, form):
    page = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    names = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(re.search(r"^def read\(.*?\n(?=\n\n\S)", page, re.M | re.S)[0], names)
    colour = Image.fromarray(noise(0, 12, 20))
    veiled = colour.copy()
    veiled.putalpha(Image.fromarray(noise(1, 12, 20)[..., 0]))
    hidden = colour.copy()
    hidden.putalpha(0)
    wide = Image.fromarray(noise(2, 20, 12)[..., 0].astype(np.uint16) * 20)
    few = colour.quantize(8)
    few.info["transparency"] = 3
    pictures = [colour, veiled, hidden, wide, few, colour.convert("1"), veiled.convert("LA")]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
        found = names["read"](tmp_path / f"{number}.png", 8, dataclasses.asdict(form))
        expected = decode(str(tmp_path / f"{number}.png"), 8, form)
        assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_probabilities_are_averaged_with_those_of_mirror_images(tmp_path, precision):
    paths = make_pictures(tmp_path / "in", [f"{i}.png" for i in range(7)])
    model, precision = network(), Precision(precision, CPU)
    predicted(paths, tmp_path / "plain.csv", model, precision=precision, batch_size=7)
    predicted(paths, tmp_path / "out.csv", model, precision=precision, batch_size=7, views="mirror")
    images = np.stack([decode(path, 8) for path in paths])
    answers = []
    for pixels in (images, images[:, :, ::-1].copy()):
        loader = ImageLoader(
            pixels, np.zeros(7, np.int64), mean=CARD.mean, std=CARD.std, batch_size=7, device=CPU
        )
        with torch.inference_mode(), precision.autocast():
            answers.append(model.eval()(next(loader.epoch()).inputs).double().softmax(1))
    expected = (answers[0] + answers[1]) / 2
    lines = rows(tmp_path / "out.csv")[1:]
    assert [line[1] for line in lines] == [CLASSES[index] for index in expected.argmax(1)]
    for line, probability in zip(lines, expected.max(1).values.tolist(), strict=True):
        assert float(line[2]) == pytest.approx(probability, abs=1e-6)
    assert lines != rows(tmp_path / "plain.csv")[1:]


def test_order_over_many_chunks(tmp_path):
    """At 1000x1000 pixels, a chunk has two pictures."""
    card = ModelCard(CLASSES, CARD.mean, CARD.std, 1000, 1000, 3)
    paths = make_pictures(tmp_path / "in", [f"{i}.png" for i in range(7)])
    (tmp_path / "in" / "3.png").write_bytes(b"bad")
    seen = []

    class Mean(torch.nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x.mean((2, 3))

    predicted(paths, tmp_path / "out.csv", Mean(), card, on_bad="skip", say=lambda _: None)
    assert [os.path.basename(line[0]) for line in rows(tmp_path / "out.csv")[1:]] == [
        "0.png", "1.png", "2.png", "4.png", "5.png", "6.png"
    ]  # fmt: skip
    assert max(seen) <= 2 and sum(seen) == 6


def test_gray_is_pillows(tmp_path):
    pictures = np.stack([noise(seed, 16, 16) for seed in range(4)])
    pictures[3] = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    gray = to_gray(pictures)
    assert gray.shape == (4, 16, 16, 1) and gray.dtype == np.uint8
    for picture, found in zip(pictures, gray, strict=True):
        assert np.array_equal(found[..., 0], np.asarray(Image.fromarray(picture).convert("L")))
    assert np.array_equal(gray[3, ..., 0].ravel(), np.arange(256))  # gray stays what it is


def test_model_of_gray_pictures(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png"])
    card = ModelCard(CLASSES, (0.5,), (0.25,), 8, 8, 1)
    seen = []

    class Watch(torch.nn.Module):
        def forward(self, x):
            seen.append(x.clone())
            return torch.zeros(len(x), 3)

    predicted(paths, tmp_path / "out.csv", Watch(), card)
    expected = np.asarray(Image.open(paths[0]).convert("L")).astype(np.float32) / 255
    torch.testing.assert_close(seen[0][0, 0], torch.from_numpy((expected - 0.5) / 0.25))
    assert rows(tmp_path / "out.csv")[1][2] == "0.333333"


def test_bf16_is_close_and_softmax_is_float32(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png"])
    found = []
    for name in ("fp32", "bf16"):
        predicted(paths, tmp_path / f"{name}.csv", precision=Precision(name, CPU))
        found.append([float(line[2]) for line in rows(tmp_path / f"{name}.csv")[1:]])
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], abs=0.02)


# ---- the file ---------------------------------------------------------------------------------


def test_names_that_a_csv_file_must_quote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["=1+1.png", "-x.png", 'a,b "c".png', "line\nbreak\r.png", "ä b.png"]
    make_pictures(tmp_path, names)
    card = ModelCard(("=cmd()", "-5", "@x"), CARD.mean, CARD.std, 8, 8, 3)

    class Each(torch.nn.Module):
        def forward(self, x):
            return 100 * torch.eye(3)[torch.arange(len(x)) % 3]

    predicted(names, tmp_path / "out.csv", Each(), card, batch_size=5)
    lines = rows(tmp_path / "out.csv")[1:]
    assert [line[0] for line in lines] == ["./=1+1.png", "./-x.png", *names[2:]]
    assert [line[1] for line in lines] == ["'=cmd()", "-5", "'@x", "'=cmd()", "-5"]
    assert all(os.path.exists(line[0]) and line[2] == "1.000000" for line in lines)


def test_name_that_is_no_text(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(name, "wb") as file:
        Image.fromarray(noise(0)).save(file, "png")
    predicted(list_pictures(tmp_path), tmp_path / "out.csv")
    assert rows(tmp_path / "out.csv")[1][0].endswith("/caf\\udce9.png")


def test_old_file_is_replaced_only_by_a_whole_one(tmp_path):
    output = tmp_path / "new folder" / "out.csv"
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    predicted(paths[:1], output)
    before = output.read_bytes()
    stopped = iter([None])
    with pytest.raises(StopIteration):
        predicted(paths, output, before_batch=lambda: next(stopped))
    (tmp_path / "in" / "c.png").write_bytes(b"bad")
    with pytest.raises(UserError):
        predicted(paths, output)
    assert output.read_bytes() == before and os.listdir(output.parent) == ["out.csv"]
    predicted(paths[:2], output)
    assert len(rows(output)) == 3


def test_output_that_cannot_be_written(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png"])
    with pytest.raises(UserError, match="and is not a file"):
        predicted(paths, tmp_path / "in")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="and is not a file"):
        predicted(paths, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.csv").symlink_to("target.csv")
    predicted(paths, tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "target.csv").is_file()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot write .*out\.csv"):
        predicted(paths, tmp_path / "file" / "out.csv")


# ---- bad input --------------------------------------------------------------------------------


def test_bad_file_is_named_or_skipped_and_counted(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    (tmp_path / "in" / "b.png").write_bytes(b"no picture")
    refused(paths, tmp_path / "out.csv", "b.png", "known format", "--on_bad skip")
    said = []
    assert predicted(paths, tmp_path / "out.csv", on_bad="skip", say=said.append) == (2, 1)
    assert len(said) == 1 and "1 bad file left out, such as" in said[0] and "b.png" in said[0]
    assert [line[0] for line in rows(tmp_path / "out.csv")[1:]] == [paths[0], paths[2]]


def test_a_list_gets_a_row_for_each_name(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png"])
    paths[1:1] = [str(tmp_path / "absent.png")]
    files = PictureFiles(paths, CARD, workers=0, on_bad="skip", names=["=1", "x,y", "b"])
    precision, output = Precision("fp32", CPU), tmp_path / "out.csv"
    predict_images(network(), files, output_csv=output, batch_size=2, precision=precision)
    found = rows(output)[1:]
    assert [row[0] for row in found] == ["=1", "x,y", "b"] and {*found[1][1:]} == {""}
    predicted(paths[::2], tmp_path / "alone.csv")
    assert [row[1:] for row in found[::2]] == [row[1:] for row in rows(tmp_path / "alone.csv")[1:]]


def test_nothing_readable(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    output = tmp_path / "out" / "out.csv"
    refused(list_pictures(tmp_path), output, "none of the 1 files", "a.png", on_bad="skip")
    refused([], output, "none of the 0 files")


def test_pictures_that_are_not_square(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png"])
    card = ModelCard(CLASSES, CARD.mean, CARD.std, 8, 12, 3)
    refused(paths, tmp_path / "out.csv", "8x12", "squares only", card=card)


def test_answer_that_is_not_a_number(tmp_path):
    paths = make_pictures(tmp_path / "in", ["a.png"])
    model = network()
    torch.nn.init.constant_(model[-1].bias, float("nan"))
    refused(paths, tmp_path / "out.csv", "a.png is not a number", "--precision fp32", model=model)


def test_a_line_now_and_then_without_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.inference.predict_pictures.PLAIN_LINE_SECONDS", 0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png", "c.png"])
    said = []
    predicted(paths, tmp_path / "out.csv", say=said.append)
    assert said[0] == "2 of 3 pictures"


def test_files_left_out_count_as_progress(tmp_path, monkeypatch):
    """Also where none of a chunk is a picture."""
    monkeypatch.setattr("utils.inference.predict_pictures.PLAIN_LINE_SECONDS", 0)
    monkeypatch.setattr("sys.stderr", io.StringIO())

    def one_by_one(paths, *options, **further):
        for path in paths:
            yield from decode_all([path], *options, **further)

    monkeypatch.setattr("utils.inference.predict_pictures.decode_all", one_by_one)
    paths = make_pictures(tmp_path / "in", ["a.png", "b.png", "c.png", "d.png"])
    for path in (paths[0], paths[1], paths[3]):
        Path(path).write_bytes(b"no picture")
    said = []
    assert predicted(paths, tmp_path / "out.csv", say=said.append, on_bad="skip") == (1, 3)
    assert said[:-1] == [f"{done} of 4 pictures" for done in (1, 2, 3, 4)]
