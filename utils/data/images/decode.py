"""Decodes image files of many formats to RGB pictures of one size."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import multiprocessing
import re
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from ...errors import Faults, UserError
from .file_formats import open_image
from .image_data import USUAL, Form

# Errors after which reading the picture again would fail, too. Pillow's own have no number; a
# damaged TIFF makes it seek to a position that no file has, which is EINVAL.
_PERMANENT = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)

LETTERBOX = (114, 114, 114)  # RGB of the bars: near the mean of photographs
_TOO_LARGE = (Image.DecompressionBombWarning, Image.DecompressionBombError)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(source: str | BinaryIO, size: int, form: Form = USUAL) -> np.ndarray:
    """The picture as (size, size, 3) uint8 RGB: turned as its EXIF orientation says, then resized
    bicubically, as `form` says.

    Of an animation the first frame is decoded. 16-bit gray is scaled to 8 bits. Raises any of
    Pillow's exceptions for a damaged file, ValueError for pixels without a known range.

    Args:
        source: a path, or an open file.
    """
    # Decoding at 1/2, 1/4 or 1/8 is faster; no side of the square shrinks below twice `size`.
    least = _least_for_square(form.crop_ratio, size)
    image, _ = _upright(source, lambda width, height: (least, least), form)
    if form.resize_mode == "squash":
        return resize_box(image, (0, 0, *image.size), size)
    if form.resize_mode == "letterbox":
        return np.asarray(ImageOps.pad(image, (size, size), Image.Resampling.BICUBIC, LETTERBOX))
    return resize_box(image, central_square(*image.size, form.crop_ratio), size)


def decode_window(
    source: io.BytesIO, window: np.ndarray, mirrored: bool, size: int, form: Form = USUAL
) -> np.ndarray:
    """A window of the picture as (size, size, 3) uint8 RGB, resized bicubically (antialiased).

    PyTorch resizes, in less than half of Pillow's time. Raises what `decode` does.

    Args:
        window: top, left, height, width, in pixels of the whole upright picture, or of the square
            of its longer side that `form` makes of it.
        mirrored: left to right, after the crop.
    """
    top, left, height, width = window.tolist()
    crops = form.resize_mode == "crop"
    whole = _by_simplejpeg(source, min(height, width), size) if crops else None
    if whole is not None:
        pixels = np.ascontiguousarray(whole[top : top + height, left : left + width])
        return resize_window(pixels, mirrored, size)
    squash, letterbox = form.resize_mode == "squash", form.resize_mode == "letterbox"

    def least(w: int, h: int) -> tuple[int, int]:
        return _least_for_window(
            *((max(w, h),) * 2 if squash else (w, h)), min(height, width), size
        )

    image, (full_width, full_height) = _upright(source, least, form)
    side = max(full_width, full_height)
    if squash:
        full_width = full_height = side
    if letterbox:
        left, top = left - (side - full_width) // 2, top - (side - full_height) // 2
    x, y = image.width / full_width, image.height / full_height
    # Rounding shifts a window by a quarter of a pixel of the result at most.
    box = (round(left * x), round(top * y), round((left + width) * x), round((top + height) * y))
    if not letterbox:
        return resize_window(np.array(image.crop(box)), mirrored, size)
    part = Image.new("RGB", (max(1, box[2] - box[0]), max(1, box[3] - box[1])), LETTERBOX)
    part.paste(image, (-box[0], -box[1]))
    return resize_window(np.array(part), mirrored, size)


def _by_simplejpeg(source: io.BytesIO, window_side: int, size: int) -> np.ndarray | None:
    """The whole picture, (height, width, 3) uint8, if it is an ordinary JPEG and simplejpeg, an
    optional package, is installed: the same pixels as Pillow's, in three quarters of the time."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None:
        return None
    with open_image(source) as image:
        ordinary = image.format == "JPEG" and image.mode in ("RGB", "L")
        if not ordinary or _orientation(image) != 1:
            return None
        if shrinks_window(*image.size, window_side, size):
            return None
    try:
        return simplejpeg.decode_jpeg(source.getvalue())
    except ValueError:  # whether the picture is damaged beyond use is for Pillow to say
        return None


def central_square(width: int, height: int, crop_ratio: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom edge, in pixels, of the square that `decode` resizes."""
    side = min(width, height) * crop_ratio
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def resize_box(image: Image.Image, box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """The part of an RGB picture within `box` as (size, size, 3) uint8. Pixels beside it have some
    weight at its edges, if there are any."""
    if image.size != (size, size) or box != (0, 0, size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(image)


def resize_window(pixels: np.ndarray, mirrored: bool, size: int) -> np.ndarray:
    """(height, width, 3) uint8 -> (size, size, 3) uint8, then mirrored if asked for."""
    if pixels.shape[:2] != (size, size):
        torch = _torch()
        picture = torch.from_numpy(pixels).permute(2, 0, 1)[None]  # (1, 3, height, width)
        picture = torch.nn.functional.interpolate(
            picture, (size, size), mode="bicubic", antialias=True
        )
        pixels = picture[0].permute(1, 2, 0).numpy()
    return pixels[:, ::-1] if mirrored else pixels


def shrinks_window(width: int, height: int, window_side: int, size: int) -> bool:
    """Whether `decode_window` decodes a JPEG at half its size or less.

    Args:
        window_side: the shorter side of the window.
    """
    least_width, least_height = _least_for_window(width, height, window_side, size)
    return min(width // least_width, height // least_height) >= 2


def _least_for_window(width: int, height: int, window_side: int, size: int) -> tuple[int, int]:
    """(width, height) below which a JPEG is not decoded, so that no side of the window shrinks
    below twice `size`."""
    factor = 2 * size / window_side
    return math.ceil(factor * width), math.ceil(factor * height)


def _least_for_square(crop_ratio: float, size: int) -> int:
    return math.ceil(2 * size / crop_ratio)


@functools.cache
def _simplejpeg():
    with contextlib.suppress(ImportError):
        import simplejpeg

        return simplejpeg


@functools.cache
def _torch():
    """Imported on use: worker processes for decoded pictures do without PyTorch."""
    import torch

    if multiprocessing.parent_process() is not None:  # a worker: there is one for each core
        torch.set_num_threads(1)
    return torch


def measure(source: BinaryIO, length: int, thorough: bool = False) -> tuple[int, int]:
    """(height, width) in pixels of the upright picture in the file of `length` bytes.

    Reads the header, and the end of JPEG and PNG files, which tells whether they were cut short.
    Other formats, unusual pixels and, if `thorough`, all pictures are decoded. Raises what `decode`
    does.
    """
    if length == 0:
        raise ValueError("it has no bytes")
    with open_image(source) as image:
        kind, mode, (width, height) = image.format, image.mode, image.size
        exif = kind == "JPEG" or (kind == "PNG" and _mentions_exif(source))
        turned = exif and _orientation(image) >= 5
    if thorough or mode.startswith(("I", "F")) or not _ends_well(source, kind, length):
        source.seek(0)
        image, (width, height) = _upright(source, lambda *_: (8, 8), USUAL)
        return height, width
    return (width, height) if turned else (height, width)


def _upright(source: str | BinaryIO, least, form: Form) -> tuple[Image.Image, tuple[int, int]]:
    """The decoded picture as 8-bit RGB, turned as its EXIF orientation says, and the (width,
    height) that it has undiminished.

    Args:
        least: (width, height) of a JPEG -> the size below which it need not be decoded.
    """
    with open_image(source) as image:
        full = image.size
        if image.format == "JPEG":
            image.draft(None, least(*full))
        image.load()
        orientation = _orientation(image)
        turn = _UPRIGHT.get(orientation)
        image = to_rgb(image, form)
        if turn is not None:
            image = image.transpose(turn)
    return image, (full[::-1] if orientation >= 5 else full)


def _mentions_exif(source: BinaryIO) -> bool:
    """Of a PNG, whose EXIF may follow the pixels, and which Pillow would decode to find it."""
    source.seek(0)
    content = source.read()
    source.seek(0)
    return b"eXIf" in content or b"Raw profile type exif" in content


def _ends_well(source: BinaryIO, kind: str | None, length: int) -> bool:
    """Whether the file surely ends as its format asks for."""
    mark = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(kind)
    if mark is None:
        return False
    source.seek(max(0, length - 32))  # a few bytes may follow
    return mark in source.read(32)


def to_rgb(image: Image.Image, form: Form) -> Image.Image:
    """A loaded picture of any mode as 8-bit RGB."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow may keep in 32 ("I")
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("32-bit pixels, which have no known range")
        pixels = (255 * pixels + form.white_level // 2) // form.white_level
        image = Image.fromarray(pixels.clip(max=255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels, which have no known range")
    elif image.has_transparency_data:
        image = image.convert("RGBA")  # applies the palette
        # Where nothing is to be seen, as in many files of TGA, the channel is not used.
        if form.transparency != "dropped" and image.getchannel("A").getbbox():
            ground = Image.new("RGBA", image.size, form.transparency)
            image = Image.alpha_composite(ground, image)
    elif image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1, which is upright, for anything else."""
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION)
        return orientation if orientation in _UPRIGHT else 1
    except Exception:  # damaged EXIF does not mean that the picture is damaged
        return 1


def why(error: Exception) -> str:
    """In a line, why a picture could not be decoded."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, _TOO_LARGE) and (pixels := re.search(r"\d+", text)):
        millions = math.ceil(int(pixels[0]) / 1e6)
        most = math.floor(Image.MAX_IMAGE_PIXELS / 1e6)
        text = (
            f"it has {millions:,} million pixels, more than the {most} million that are read: make "
            "it smaller"
        )
    if isinstance(error, Image.UnidentifiedImageError):
        text = "not an image of a known format"
    return " ".join(text.split())


def not_readable(record: str, problem: str, kind: str = "pictures") -> UserError:
    """The error to raise for a bad `record`, a path or a place in a file."""
    return UserError(
        f"{record} is not a readable picture ({problem}): remove it, or leave out all such {kind} "
        "with --on_bad skip"
    )


def unreadable(bad: Sequence[tuple[str, str]], kind: str = "pictures") -> UserError:
    """The error to raise for all bad records, each with its problem."""
    if len(bad) == 1:
        return not_readable(*bad[0], kind)
    told = [f"{record} ({problem})" for record, problem in bad[: Faults.MOST]]
    more = ["..."] * (len(bad) > Faults.MOST)
    return UserError(
        f"{len(bad):,} {kind} cannot be read: {', '.join(told + more)}: remove them, or leave them "
        "out with --on_bad skip"
    )


def raise_transient(record: str, error: Exception) -> None:
    """Raises UserError for a transient error, after which the picture may still be good: permission
    is denied, a disk fails, descriptors run out. A cache would leave out the picture for ever.

    MemoryError is not one of these: a damaged picture can ask for terabytes, and a process for
    which there is really too little memory is killed instead."""
    if isinstance(error, OSError) and error.errno not in _PERMANENT:
        raise UserError(
            f"cannot read {record}: {why(error)}; give the same command again when it can be read"
        ) from error


def decode_all(
    paths: list[str], size: int, workers: int, form: Form = USUAL, *, kept: bool = True
) -> Generator[tuple[np.ndarray, dict[int, str]]]:
    """Decode files in `workers` threads, a chunk in each.

    Yields in order, for each chunk, the decoded pictures, (n, size, size, 3) uint8, and for files
    that cannot be decoded: offset in the chunk -> reason. A few more than `workers` chunks, of
    about 8 MiB at most, are in memory.

    Args:
        kept: whether a cache keeps the list of files that cannot be decoded.

    Raises:
        UserError: if so, see `raise_transient`.
    """
    length = max(1, min(256, (8 << 20) // (3 * size * size)))

    def decode_chunk(chunk: list[str]) -> tuple[np.ndarray, dict[int, str]]:
        pictures, errors = np.empty((len(chunk), size, size, 3), np.uint8), {}
        good = 0
        for offset, path in enumerate(chunk):
            try:
                pictures[good] = decode(path, size, form)
                good += 1
            except Exception as error:  # a damaged file can make Pillow raise any exception
                if kept:
                    raise_transient(path, error)
                errors[offset] = why(error)
        return pictures[:good], errors

    chunks = (paths[start : start + length] for start in range(0, len(paths), length))
    return in_threads(decode_chunk, chunks, workers, "decode")


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Makes Pillow's warning of a too large picture an error, and hides its other warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def in_threads(function: Callable, items: Iterable, workers: int, name: str) -> Generator:
    """function(item) for each item, in order. A few more than `workers` results are in memory.

    Args:
        name: what the threads' names begin with.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    return in_order(pool, function, items, workers + 1)


def in_order(pool: Executor, function: Callable, items: Iterable, ahead: int) -> Generator:
    """The same by a pool of threads or processes, which it ends: `ahead` results are computed while
    one is in use."""
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
