"""The decoder that NVIDIA DALI is part of, on a CPU, against Pillow alone."""

import dataclasses
import os

import numpy as np
import pytest
import simplejpeg
from dali_pictures import encoded, load, make_photos, smooth
from PIL import Image

from utils.augment.resized_crop import ResizedCrop
from utils.data.images import dali, decode
from utils.data.images.dali import CpuDecoder, GpuDecoder
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


def passed_to_dali(decoder) -> list[int]:
    """How many pictures DALI is given, call by call; the list is extended as it is called."""
    run, counts = decoder._run, []

    def counted(contents, *others):
        counts.append(len(contents))
        return run(contents, *others)

    decoder._run = counted
    return counts


def both(pictures, windowed: bool, index=None):
    """What Pillow and what DALI make of the pictures, and how many DALI was given."""
    index = np.arange(len(pictures.records)) if index is None else index
    asked = windows_and_flips(pictures, index) if windowed else ()
    decoder = CpuDecoder(pictures)
    counts = passed_to_dali(decoder)
    return pictures.decode(index, *asked), decoder.decode(index, *asked), counts


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("size, crop_ratio", [(32, 1.0), (32, 0.875), (10, 1.0), (4, 0.5)])
def test_pictures_are_those_of_pillow_to_the_bit(photos, size, crop_ratio, windowed):
    """At 10 and 4 pixels Pillow decodes some or all at a fraction of their size."""
    pictures = dataclasses.replace(photos, size=size, form=Form(crop_ratio=crop_ratio))
    plain, found, counts = both(pictures, windowed)
    assert np.array_equal(found, plain)
    assert sum(counts) == 24 if size == 32 else sum(counts) < 24


def test_pictures_do_not_depend_on_their_batch(photos, monkeypatch):
    index = np.random.default_rng(1).permutation(24)
    asked = windows_and_flips(photos, index)
    whole = CpuDecoder(photos).decode(index, *asked)
    one = CpuDecoder(photos).decode(index[7:8], *(each[7:8] for each in asked))
    assert np.array_equal(one[0], whole[7])
    monkeypatch.setattr(dali, "AT_ONCE", 5)
    assert np.array_equal(CpuDecoder(photos).decode(index, *asked), whole)


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


@pytest.mark.parametrize("windowed", [True, False])
def test_unusual_pictures_too(tmp_path, windowed):
    pictures = make_odd_pictures(tmp_path)
    plain, decoded, counts = both(pictures, windowed)
    for record in range(len(plain)):
        assert np.array_equal(decoded[record], plain[record]), pictures.records.describe(record)
    assert sum(counts) == 15  # the JPEGs


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


def cut_short(content: bytearray) -> None:
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)


def no_jpeg(content: bytearray) -> None:
    content[3:] = bytes(len(content) - 3)


def flipped(content: bytearray) -> None:
    content[-200] ^= 0xFF


def test_a_damaged_picture_is_named_in_one_line_as_without_dali(tmp_path):
    pictures = load(make_photos(tmp_path / "photos")).train.pictures
    index = np.arange(24)
    windows, flips = windows_and_flips(pictures, index)
    damage(pictures, 9, no_jpeg)
    messages = []
    for decoder in (pictures, CpuDecoder(pictures)):
        with pytest.raises(UserError) as error:
            decoder.decode(index, windows, flips)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    assert pictures.records.describe(9) in messages[0] and "--on_bad skip" in messages[0]
    # The decoder goes on, with a pipeline of its own.
    decoder, good = CpuDecoder(pictures), np.array([1, 2])
    with pytest.raises(UserError):
        decoder.decode(index, windows, flips)
    asked = windows[good], flips[good]
    assert np.array_equal(decoder.decode(good, *asked), pictures.decode(good, *asked))


@pytest.mark.parametrize("change", [cut_short, flipped])
def test_what_pillow_decodes_in_spite_of_damage_is_decoded(tmp_path, change):
    pictures = load(make_photos(tmp_path / "photos")).train.pictures
    damage(pictures, 3, change)
    outcomes = []
    for decoder in (pictures, CpuDecoder(pictures)):
        try:
            outcomes.append(decoder.decode(np.arange(6)))
        except UserError as error:
            outcomes.append(str(error))
    plain, found = outcomes
    assert type(plain) is type(found)
    if isinstance(plain, str):
        assert plain == found
    else:
        others = np.array([0, 1, 2, 4, 5])
        assert np.array_equal(found[others], plain[others])


def test_a_picture_that_dali_alone_fails_to_decode_is_decoded_by_pillow(photos, monkeypatch):
    decoder = CpuDecoder(photos)
    outputs, index = decoder._outputs, np.arange(24)
    victim = photos.records.read(11)

    def fail(inputs, parts, flips):
        if any(bytes(content) == victim for content in inputs["contents"]):
            raise RuntimeError("no room")
        return outputs(inputs, parts, flips)

    monkeypatch.setattr(decoder, "_outputs", fail)
    assert np.array_equal(decoder.decode(index), photos.decode(index))


def test_a_dali_that_does_not_work_here_is_no_damaged_picture(photos, monkeypatch):
    class Broken:
        def build(self):
            raise RuntimeError("CUDA driver\nis too old")

    decoder = CpuDecoder(photos)
    monkeypatch.setattr(decoder, "_build", Broken)
    with pytest.raises(UserError, match=r"\(CUDA driver is too old\): use --loader workers"):
        decoder.decode(np.arange(4))


# ---- what runs on a GPU, on the CPU --------------------------------------------------------------


@pytest.mark.parametrize("crop_ratio", [1.0, 0.8])
@pytest.mark.parametrize("windowed", [True, False])
def test_the_pipeline_for_a_gpu_differs_by_few_levels(photos, windowed, crop_ratio):
    """DALI also resizes and mirrors there. (nvJPEG may differ by more than libjpeg-turbo.)"""
    pictures = dataclasses.replace(photos, form=Form(crop_ratio=crop_ratio))
    index = np.random.default_rng(2).permutation(24)
    asked = windows_and_flips(pictures, index) if windowed else ()
    found = GpuDecoder(pictures, None, threads=2).decode(index, *asked).numpy()
    apart = np.abs(found.astype(int) - pictures.decode(index, *asked))
    assert apart.mean((1, 2, 3)).max() < 0.5 and apart.max() <= 6


def test_other_formats_reach_the_pipeline_for_a_gpu_from_pillow(tmp_path):
    root = make_photos(tmp_path / "photos")
    (root / "train" / "cat" / "png.png").write_bytes(encoded(smooth(50, 60), "PNG"))
    pictures = load(root).train.pictures
    index = np.arange(25)
    asked = windows_and_flips(pictures, index)
    found = GpuDecoder(pictures, None, threads=1).decode(index, *asked).numpy()
    plain = pictures.decode(index, *asked)
    png = [r for r in range(25) if pictures.records.describe(r).endswith("png")]
    assert np.array_equal(found[png], plain[png])
    assert np.abs(found.astype(int) - plain).max() <= 6


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
