"""Decodes JPEGs by NVIDIA DALI (https://docs.nvidia.com/deeplearning/dali), an optional package.

DALI decodes only the window of a JPEG that is needed. Which pictures, windows and flips these are
is decided elsewhere, as for any other decoder; they reach DALI by `external_source`. Other formats,
JPEGs that Pillow decodes faster at half their size, and whatever DALI fails to decode are left to
the decoder of records.py.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from ...errors import UserError, one_line
from .decode import (
    central_square,
    resize_box,
    resize_window,
    shrinks_square,
    shrinks_window,
)
from .records import EncodedPictures, RecordReader

if TYPE_CHECKING:
    from nvidia.dali import Pipeline
    from torch import Tensor

JPEG = b"\xff\xd8\xff"  # the first bytes of every JPEG
AT_ONCE = 64  # pictures in a batch of DALI, which bounds its memory


def require_dali() -> None:
    """Raises UserError if DALI is not installed."""
    if importlib.util.find_spec("nvidia") is None or not importlib.util.find_spec("nvidia.dali"):
        raise UserError(
            "--loader dali needs NVIDIA DALI: pip install -r requirements-dali.txt, or leave the "
            "flag out"
        )


@dataclass(frozen=True)
class DaliReader(RecordReader):
    """Like RecordReader, by DALI on a CPU, with one thread: each worker has a reader."""

    def open(self) -> CpuDecoder:
        if multiprocessing.parent_process() is not None:  # a worker, which prints nothing else
            _discard_output()
        return CpuDecoder(self.pictures)


@dataclass(frozen=True)
class DaliGpuReader(RecordReader):
    """Like RecordReader, by DALI and nvJPEG; the pictures are then on the GPU.

    Args:
        device: number of the GPU; None: DALI does the same on the CPU, for tests.
        threads: of the CPU, which take part in decoding.
    """

    device: int | None = 0
    threads: int = 1

    def open(self) -> GpuDecoder:
        return GpuDecoder(self.pictures, self.device, self.threads)


class Part(NamedTuple):
    """What is needed of a picture.

    Attributes:
        area: (4,) int32: what is decoded: top, left, height, width, in pixels of the upright
            picture.
        box: what is resized of it: left, top, right, bottom, in pixels of the area.
        is_window: it is a window of a training picture, not the central square.
    """

    area: np.ndarray
    box: tuple[float, float, float, float]
    is_window: bool


class DaliDecoder(ABC):
    """Takes the place of EncodedPictures for an augmentation."""

    def __init__(self, pictures: EncodedPictures):
        self.pictures = pictures
        self._pipeline: Any = None

    def sizes(self, index: np.ndarray) -> np.ndarray:
        return self.pictures.sizes(index)

    def decode(
        self,
        index: np.ndarray,
        windows: np.ndarray | None = None,
        flips: np.ndarray | None = None,
    ):
        """As EncodedPictures.decode."""
        out = self._empty(len(index))
        for start in range(0, len(index), AT_ONCE):
            piece = slice(start, start + AT_ONCE)
            window, flip = (each if each is None else each[piece] for each in (windows, flips))
            self._decode(index[piece], window, flip, out[piece])
        return out

    def _decode(self, index: np.ndarray, windows, flips, out) -> None:
        contents = [self.pictures.records.read(record) for record in index.tolist()]
        windows = [None] * len(index) if windows is None else windows
        flips = [False] * len(index) if flips is None else flips.astype(bool).tolist()
        sizes = [(height, width) for height, width in self.sizes(index).tolist()]
        chosen = [
            place
            for place, content in enumerate(contents)
            if content.startswith(JPEG) and self._takes(*sizes[place], windows[place])
        ]
        parts = {place: self._part(*sizes[place], windows[place]) for place in chosen}

        def run(places: list[int]) -> bool:
            """Whether DALI decoded these."""
            asked = [contents[place] for place in places], [parts[place] for place in places]
            pictures = self._run(*asked, [flips[place] for place in places])
            if pictures is not None and len(places) == len(index):
                out[:] = pictures  # a list of places would make the host wait
            elif pictures is not None:
                out[places] = pictures
            return pictures is not None

        left = set(range(len(index))) - set(chosen)
        if chosen and not run(chosen):
            # A damaged picture fails its whole batch. Alone it fails again, and the other decoder
            # decodes it, or names it. So what becomes of a picture does not depend on its batch.
            left |= {place for place in chosen if not run([place])}
        for place in sorted(left):
            found = self.pictures.decode_one(
                int(index[place]), contents[place], windows[place], flips[place]
            )
            out[place] = self._placed(found)

    def _part(self, height: int, width: int, window: np.ndarray | None) -> Part:
        if window is not None:
            return Part(window.astype(np.int32), (0, 0, int(window[3]), int(window[2])), True)
        # The whole picture: the square is most of it, and pixels beside it count at its edges.
        area = np.array([0, 0, height, width], np.int32)
        return Part(area, central_square(width, height, self.pictures.form.crop_ratio), False)

    def _run(self, contents: list[bytes], parts: list[Part], flips: list[bool]):
        """(n, size, size, 3) uint8; None if DALI fails."""
        if self._pipeline is None:
            self._pipeline = self._working_pipeline()
        areas = np.stack([part.area for part in parts])
        inputs = {
            "contents": [np.frombuffer(content, np.uint8) for content in contents],
            "start": np.ascontiguousarray(areas[:, :2]),
            "shape": np.ascontiguousarray(areas[:, 2:]),
        }
        try:
            return self._outputs(inputs, parts, flips)
        except RuntimeError:
            self._pipeline = None  # DALI says that it is no longer valid
            return None

    def _working_pipeline(self) -> Any:
        pipeline = self._build()
        try:
            pipeline.build()  # else a driver that is too old would look like a damaged picture
        except RuntimeError as error:
            raise UserError(
                f"NVIDIA DALI does not work here ({one_line(error, 200)}): use --loader workers, "
                "or install the DALI for the CUDA of this machine (see requirements-dali.txt)"
            ) from error
        return pipeline

    @abstractmethod
    def _takes(self, height: int, width: int, window: np.ndarray | None) -> bool:
        """Whether DALI decodes a JPEG of this size."""

    @abstractmethod
    def _build(self) -> Any:
        """A pipeline of DALI."""

    @abstractmethod
    def _outputs(self, inputs: dict, parts: list[Part], flips: list[bool]):
        """(n, size, size, 3) uint8: what the pipeline makes of its inputs, resized and mirrored.
        Raises RuntimeError if DALI fails."""

    @abstractmethod
    def _empty(self, n: int):
        """(n, size, size, 3) uint8."""

    @abstractmethod
    def _placed(self, pixels: np.ndarray):
        """A picture that was decoded without DALI, where the others are."""


class CpuDecoder(DaliDecoder):
    """Only decoding is DALI's: PyTorch and Pillow resize faster on a CPU. Pictures are those of
    EncodedPictures to the bit, as both decode JPEGs by libjpeg-turbo."""

    def _takes(self, height: int, width: int, window: np.ndarray | None) -> bool:
        size = self.pictures.size
        if window is None:
            return not shrinks_square(width, height, self.pictures.form.crop_ratio, size)
        return not shrinks_window(width, height, int(window[2:].min()), size)

    def _build(self) -> Any:
        return make_pipeline(AT_ONCE, threads=1, device=None)

    def _outputs(self, inputs: dict, parts: list[Part], flips: list[bool]) -> np.ndarray:
        (found,) = self._pipeline.run(**inputs)
        out = self._empty(len(parts))
        for place, (part, flip) in enumerate(zip(parts, flips, strict=True)):
            pixels = found.at(place)  # of the area
            if part.is_window:
                out[place] = resize_window(pixels, flip, self.pictures.size)
            else:
                out[place] = resize_box(Image.fromarray(pixels), part.box, self.pictures.size)
        return out

    def _empty(self, n: int) -> np.ndarray:
        return np.empty((n, self.pictures.size, self.pictures.size, 3), np.uint8)

    def _placed(self, pixels: np.ndarray) -> np.ndarray:
        return pixels


class GpuDecoder(DaliDecoder):
    """Decodes by nvJPEG, resizes and mirrors on the GPU. Its pictures are tensors there, and differ
    from those of EncodedPictures by a few levels."""

    def __init__(self, pictures: EncodedPictures, device: int | None, threads: int):
        super().__init__(pictures)
        self._device, self._threads = device, threads

    def _takes(self, height: int, width: int, window: np.ndarray | None) -> bool:
        return True

    def _build(self) -> Any:
        size = (self.pictures.size, self.pictures.size)
        return make_pipeline(AT_ONCE, self._threads, self._device, resized_to=size)

    def _outputs(self, inputs: dict, parts: list[Part], flips: list[bool]) -> Tensor:
        boxes = np.array([part.box for part in parts], np.float32)
        inputs["box_start"] = np.ascontiguousarray(boxes[:, 1::-1])  # top, left
        inputs["box_end"] = np.ascontiguousarray(boxes[:, :1:-1])  # bottom, right
        inputs["flip"] = np.array(flips, np.int32)
        import torch

        stream = None if self._device is None else torch.cuda.current_stream(self._device)
        (found,) = self._pipeline.run(stream, **inputs)
        return torch.from_dlpack(found.as_tensor())

    def _empty(self, n: int) -> Tensor:
        import torch

        size = self.pictures.size
        return torch.empty((n, size, size, 3), dtype=torch.uint8, device=self._torch_device)

    def _placed(self, pixels: np.ndarray) -> Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(pixels)).to(self._torch_device)

    @property
    def _torch_device(self) -> str:
        return "cpu" if self._device is None else f"cuda:{self._device}"


def _discard_output() -> None:
    """From here on nothing that this process prints is seen. DALI prints lines about damaged
    pictures, which cannot be switched off; we name those that end the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)


def make_pipeline(
    largest: int, threads: int, device: int | None, resized_to: tuple[int, int] | None = None
) -> Pipeline:
    """Decodes `contents` within `start` and `shape` (height, width); then, if `resized_to` is set,
    resizes from `box_start` to `box_end` and mirrors where `flip` is 1.

    Args:
        largest: pictures in the largest batch.
        threads: of the CPU.
        device: number of the GPU; None: the CPU does everything.
        resized_to: height and width.
    """
    from nvidia.dali import Pipeline, fn, types  # takes a second

    def given(name: str, dtype=types.INT32, ndim: int = 1):
        return fn.external_source(name=name, dtype=dtype, ndim=ndim)

    # `run` takes inputs only with a queue of 1. Batches are read ahead by the workers instead.
    pipeline = Pipeline(largest, threads, device, prefetch_queue_depth=1)
    with pipeline:
        pictures = fn.decoders.image_slice(
            given("contents", types.UINT8),
            start=given("start"),
            shape=given("shape"),
            axis_names="HW",
            device="cpu" if device is None else "mixed",
            jpeg_fancy_upsampling=True,  # as libjpeg-turbo does
        )
        if resized_to is not None:
            pictures = fn.resize(
                pictures,
                size=resized_to,
                roi_start=given("box_start", types.FLOAT),
                roi_end=given("box_end", types.FLOAT),
                interp_type=types.INTERP_CUBIC,
                antialias=True,
            )
            pictures = fn.flip(pictures, horizontal=given("flip", ndim=0))
        pipeline.set_outputs(pictures)
    return pipeline
