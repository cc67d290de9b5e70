"""The decoder that NVIDIA DALI is part of, as on a GPU but on the CPU, against Pillow alone."""

import dataclasses
import os

import numpy as np
import pytest
import simplejpeg
from dali_pictures import encoded, load, make_photos, smooth
from PIL import Image

from utils.augment.resized_crop import ResizedCrop
from utils.data.images import dali, decode
from utils.data.images.dali import DaliDecoder
from utils.data.images.image_data import Form
from utils.errors import UserError

SIZE = 32


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return load(make_photos(tmp_path_factory.mktemp("pictures") / "photos")).train.pictures


@pytest.fixture(autouse=True)
def pillow_alone(monkeypatch):
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    with decode.strict_pillow():
        yield


def windows_and_flips(pictures, index, seed=0):
    crop = ResizedCrop()
    plan = crop.draw(len(index), np.random.default_rng(seed))
    return crop.windows(plan, pictures.sizes(index)), plan.flip


def by_dali(pictures) -> DaliDecoder:
    return DaliDecoder(pictures, None, threads=2)


def assert_near(found, plain) -> None:
    apart = np.abs(found.numpy().astype(int) - plain)
    assert apart.mean((1, 2, 3)).max() < 0.5 and apart.max() <= 6


def rotated(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, exif=exif)


def make_odd_pictures(folder):
    """JPEGs and other files, as EncodedPictures."""
    image, gray = smooth(60, 80), smooth(70, 50).convert("L")
    deep = Image.fromarray((np.asarray(gray).astype(np.uint16) * 257).astype(np.uint16))
    kinds = {
        "gray.jpg": encoded(gray),
        "cmyk.jpg": encoded(image.convert("CMYK")),
        "progressive.jpg": encoded(image, progressive=True),
        "444.jpg": encoded(image, subsampling=0),
        "422.jpg": encoded(image, subsampling=1),
        "rgb.jpg": encoded(image, keep_rgb=True),
        **{f"turned{n}.jpg": rotated(image, n) for n in range(1, 9)},
        "several.jpg": encoded(image, "MPO", save_all=True, append_images=[gray]),
        "png.jpg": encoded(image, "PNG"),
        "rgb.png": encoded(image, "PNG"),
        "alpha.png": encoded(smooth(60, 80).convert("RGBA"), "PNG"),
        "palette.png": encoded(image.quantize(16), "PNG"),
        "deep.png": encoded(deep, "PNG"),
        "lossy.webp": encoded(image, "WEBP"),
        "picture.bmp": encoded(image, "BMP"),
    }
    for number, (name, content) in enumerate(kinds.items()):
        path = folder / "odd" / "train" / ("cat", "dog")[number % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pictures = load(folder / "odd", test_fraction=0.2).train.pictures
    assert len(pictures.records) == len(kinds)
    return pictures


# ---- damaged pictures ----------------------------------------------------------------------------


def damage(pictures, record: int, change) -> None:
    """Changes the bytes of a record, but not size and time, by which changes are noticed."""
    path = pictures.records.path(int(pictures.records.table["file"][record]))
    state = os.stat(path)
    with open(path, "rb+") as file:
        content = bytearray(file.read())
        change(content)
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def no_jpeg(content: bytearray) -> None:
    content[3:] = bytes(len(content) - 3)


def test_a_damaged_picture_is_named_in_one_line_as_without_dali(tmp_path):
    pictures = load(make_photos(tmp_path / "photos")).train.pictures
    index = np.arange(24)
    windows, flips = windows_and_flips(pictures, index)
    damage(pictures, 9, no_jpeg)
    messages = []
    for decoder in (pictures, by_dali(pictures)):
        with pytest.raises(UserError) as error:
            decoder.decode(index, windows, flips)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    assert pictures.records.describe(9) in messages[0] and "--on_bad skip" in messages[0]
    # The decoder goes on, with a pipeline of its own.
    decoder, good = by_dali(pictures), np.array([1, 2])
    with pytest.raises(UserError):
        decoder.decode(index, windows, flips)
    asked = windows[good], flips[good]
    assert_near(decoder.decode(good, *asked), pictures.decode(good, *asked))


def test_a_picture_that_dali_alone_fails_to_decode_is_decoded_by_pillow(photos, monkeypatch):
    decoder, index = by_dali(photos), np.arange(24)
    outputs, victim = decoder._outputs, photos.records.read(11)

    def fail(inputs):
        if any(bytes(content) == victim for content in inputs["contents"]):
            raise RuntimeError("no room")
        return outputs(inputs)

    monkeypatch.setattr(decoder, "_outputs", fail)
    found, plain = decoder.decode(index), photos.decode(index)
    assert np.array_equal(found[11], plain[11])
    assert_near(found, plain)


def test_a_dali_that_does_not_work_here_is_no_damaged_picture(photos, monkeypatch):
    class Broken:
        def build(self):
            raise RuntimeError("CUDA driver\nis too old")

    monkeypatch.setattr(dali, "make_pipeline", lambda *_: Broken())
    with pytest.raises(UserError, match=r"\(CUDA driver is too old\): use --loader workers"):
        by_dali(photos).decode(np.arange(4))


# ---- pixels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop_ratio", [1.0, 0.8])
@pytest.mark.parametrize("windowed", [True, False])
def test_pictures_differ_from_pillows_by_few_levels(photos, windowed, crop_ratio, monkeypatch):
    """DALI also resizes and mirrors. (nvJPEG may differ by more than libjpeg-turbo.)"""
    monkeypatch.setattr(dali, "AT_ONCE", 10)
    pictures = dataclasses.replace(photos, form=Form(crop_ratio=crop_ratio))
    index = np.random.default_rng(2).permutation(24)
    asked = windows_and_flips(pictures, index) if windowed else ()
    found = by_dali(pictures).decode(index, *asked)
    assert_near(found, pictures.decode(index, *asked))


@pytest.mark.parametrize("windowed", [True, False])
def test_other_formats_are_decoded_by_pillow(tmp_path, windowed):
    pictures = make_odd_pictures(tmp_path)
    index = np.arange(len(pictures.records))
    asked = windows_and_flips(pictures, index) if windowed else ()
    found, plain = by_dali(pictures).decode(index, *asked).numpy(), pictures.decode(index, *asked)
    jpeg = [pictures.records.read(record).startswith(dali.JPEG) for record in index]
    assert sum(jpeg) == 15
    for record in index:
        where = pictures.records.describe(record)
        apart = np.abs(found[record].astype(int) - plain[record])
        assert apart.max() <= (8 if jpeg[record] else 0), where


# ---- simplejpeg ----------------------------------------------------------------------------------


def test_simplejpeg_decodes_windows_to_the_same_bits(photos, monkeypatch):
    index, calls = np.arange(24), []
    asked = windows_and_flips(photos, index)
    plain = photos.decode(index, *asked)
    original = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *a: calls.append(1) or original(*a))
    monkeypatch.setattr(decode, "_simplejpeg", lambda: simplejpeg)
    assert np.array_equal(photos.decode(index, *asked), plain) and len(calls) == 24


def test_simplejpeg_leaves_the_rest_to_pillow(tmp_path, monkeypatch):
    pictures = make_odd_pictures(tmp_path)
    index = np.arange(len(pictures.records))
    asked = windows_and_flips(pictures, index)
    plain = pictures.decode(index, *asked)
    monkeypatch.setattr(decode, "_simplejpeg", lambda: simplejpeg)
    assert np.array_equal(pictures.decode(index, *asked), plain)
