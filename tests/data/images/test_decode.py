"""Decoding to RGB of one size, compared with Pillow."""

import io

import numpy as np
import pytest
from picture_trees import noise
from PIL import Image

from utils.data.images.decode import (
    LETTERBOX,
    decode,
    decode_window,
    measure,
    strict_pillow,
    why,
)
from utils.data.images.image_data import Form


def test_resize_and_centre_crop(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    for name, array in {"wide": pixels, "high": pixels.transpose(1, 0, 2)}.items():
        path = str(tmp_path / f"{name}.png")
        image = Image.fromarray(np.ascontiguousarray(array))
        image.save(path)
        for side in (30, 10, 80):
            size = (2 * side, side) if name == "wide" else (side, 2 * side)
            left, top = ((length - side) // 2 for length in size)
            resized = image.resize(size, Image.Resampling.BICUBIC)
            expected = resized.crop((left, top, left + side, top + side))
            # Pillow rounds between its two passes, whose order differs here.
            assert abs(decode(path, side).astype(int) - np.asarray(expected)).max() <= 1


def test_large_jpeg_is_decoded_smaller_and_looks_the_same(tmp_path):
    ramp = np.linspace(0, 255, 1024)
    pixels = np.stack([ramp + 0 * ramp[:, None], 0 * ramp + ramp[:, None]], -1)
    pixels = np.concatenate([pixels, 255 - pixels[..., :1]], -1).astype(np.uint8)
    path = str(tmp_path / "large.jpg")
    Image.fromarray(pixels).save(path, quality=95)
    expected = np.asarray(Image.open(path).resize((32, 32), Image.Resampling.BICUBIC))
    assert abs(decode(path, 32).astype(int) - expected).max() <= 4


def in_mode(mode):
    """A picture of `mode`, a file format that keeps the mode, and the expected RGB picture."""
    colour = Image.fromarray(noise())
    gray = colour.convert("L")
    if mode == "LA":
        image = Image.merge("LA", (gray, Image.fromarray(noise(channels=1)[..., 0])))
        return image, "png", gray.convert("RGB")
    if mode == "RGBA":
        image = colour.copy()
        image.putalpha(Image.fromarray(noise(channels=1)[..., 0]))
        return image, "png", colour
    if mode == "P with transparency":
        image = colour.quantize(16)
        expected = image.convert("RGB")
        image.info["transparency"] = bytes(range(16))
        return image, "png", expected
    if mode == "I;16":
        wide = (np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8)  # 0..65520
        expected = np.round(wide / 257).astype(np.uint8)
        return Image.fromarray(wide), "png", Image.fromarray(expected).convert("RGB")
    if mode == "I;16B":
        wide = (np.arange(64, dtype=np.uint16) * 1040).reshape(8, 8)
        image = Image.frombytes("I;16B", (8, 8), wide.astype(">u2").tobytes())
        return image, "tiff", Image.fromarray(np.round(wide / 257).astype(np.uint8)).convert("RGB")
    image = colour.quantize(16) if mode == "P" else colour.convert(mode)
    return image, "png" if mode in ("1", "L", "P", "RGB") else "tiff", image.convert("RGB")


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "LA", "P", "P with transparency", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"],
)
def test_modes(tmp_path, mode):
    image, suffix, expected = in_mode(mode)
    path = tmp_path / f"picture.{suffix}"
    image.save(path)
    form = Form(transparency="dropped")
    assert np.array_equal(decode(str(path), 8, form), np.asarray(expected))


@pytest.mark.parametrize("mode", ["LA", "P with transparency", "RGBA"])
@pytest.mark.parametrize("ground, value", [("white", 255), ("black", 0)])
def test_transparent_pictures_are_laid_on_a_ground(tmp_path, mode, ground, value):
    image, suffix, colours = in_mode(mode)
    image.save(tmp_path / f"picture.{suffix}")
    image = Image.open(tmp_path / f"picture.{suffix}")
    alpha = np.asarray(image.convert("RGBA"))[..., 3:] / 255
    expected = alpha * np.asarray(colours) + (1 - alpha) * value
    found = decode(str(tmp_path / f"picture.{suffix}"), 8, Form(transparency=ground))
    assert np.abs(found - expected).max() <= 1


def test_a_channel_of_transparency_that_hides_all_is_not_used(tmp_path):
    image = Image.fromarray(noise())
    image.putalpha(0)
    image.save(tmp_path / "picture.tga")
    assert np.array_equal(decode(str(tmp_path / "picture.tga"), 8), noise())


def test_the_value_that_is_white_in_16_bits(tmp_path):
    wide = (np.arange(64, dtype=np.uint16) * 65).reshape(8, 8)  # 0..4095
    Image.fromarray(wide).save(tmp_path / "picture.png")
    found = decode(str(tmp_path / "picture.png"), 8, Form(white_level=4095))
    assert np.array_equal(found[..., 0], np.round(wide / 4095 * 255))
    assert decode(str(tmp_path / "picture.png"), 8, Form(white_level=255)).max() == 255


@pytest.mark.parametrize("height, width", [(24, 48), (48, 24), (32, 32)])
def test_the_whole_picture_is_kept(tmp_path, height, width):
    image = Image.fromarray(noise(48)[:height, :width])
    image.save(tmp_path / "picture.png")
    squashed = image.resize((32, 32), Image.Resampling.BICUBIC)
    found = decode(str(tmp_path / "picture.png"), 32, Form("squash"))
    assert np.array_equal(found, np.asarray(squashed))
    inner = image.resize((32 * width // max(height, width), 32 * height // max(height, width)), 3)
    expected = Image.new("RGB", (32, 32), LETTERBOX)
    expected.paste(inner, ((32 - inner.width) // 2, (32 - inner.height) // 2))
    found = decode(str(tmp_path / "picture.png"), 32, Form("letterbox"))
    assert np.array_equal(found, np.asarray(expected))


@pytest.mark.parametrize("mode", ["squash", "letterbox"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_windows_of_the_whole_picture(tmp_path, mode, suffix):
    """A random crop of everything looks as evaluation does, however wide the picture."""
    rows = np.repeat(np.arange(200, dtype=np.uint8)[:, None] // 10 % 2 * 200, 1600, axis=1)
    file = io.BytesIO()
    kinds = {"png": "PNG", "jpg": "JPEG"}
    Image.fromarray(np.stack([rows] * 3, 2)).save(file, kinds[suffix], quality=95)
    whole = decode(file, 32, Form(mode)).astype(int)
    found = decode_window(file, np.array([0, 0, 1600, 1600]), False, 32, Form(mode)).astype(int)
    assert abs(found - whole).mean() < 3 < whole.std()
    part = decode_window(file, np.array([0, 800, 1600, 800]), False, 32, Form(mode))
    assert abs(part.mean() - whole.mean()) < 5  # each half is like the whole


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "png", "ppm", "tif", "webp", "tga"])
def test_formats(tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    Image.fromarray(noise()).save(path)
    assert np.array_equal(decode(str(path), 8), np.asarray(Image.open(path).convert("RGB")))


def test_cmyk_jpeg(tmp_path):
    path = tmp_path / "picture.jpg"
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path, quality=100)  # red
    assert abs(decode(str(path), 8).astype(int) - [255, 0, 0]).max() <= 3


def test_first_frame_of_an_animation(tmp_path):
    path = tmp_path / "moving.gif"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert np.array_equal(decode(str(path), 8), np.asarray(frames[0]))


def test_the_orientation_that_a_camera_notes_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    path = tmp_path / "turned.png"
    Image.fromarray(noise()).save(path, exif=exif)
    assert np.array_equal(decode(str(path), 8), np.rot90(noise(), -1))


@pytest.mark.parametrize("orientation", [0, 9, (6, 6), (6, 3), b"6"])
def test_an_orientation_that_is_none_turns_nothing(monkeypatch, orientation):
    file = io.BytesIO()
    Image.fromarray(noise(16)[:8]).save(file, "JPEG")
    monkeypatch.setattr(Image.Image, "getexif", lambda _: {0x0112: orientation})
    assert measure(file, len(file.getvalue())) == (8, 16)
    assert measure(file, len(file.getvalue()), thorough=True) == (8, 16)


@pytest.mark.parametrize("side, millions", [(9_000, 90), (90_000, 900)])
def test_a_picture_that_is_too_large(side, millions):
    """Pillow warns of twice as many pixels, and raises an error beyond these."""
    with strict_pillow(), pytest.raises(Exception, match="pixels") as error:
        decode(io.BytesIO(b"P6 10000 %d 255 " % side), 8)
    assert why(error.value) == (
        f"it has {millions} million pixels, more than the 89 million that are read: make it smaller"
    )
