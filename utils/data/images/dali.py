"""Decodes JPEGs on a GPU by NVIDIA DALI (https://docs.nvidia.com/deeplearning/dali), an optional
package.

DALI decodes only the window of a JPEG that is needed. Which pictures, windows and flips these are
is decided elsewhere, as for any other decoder; they reach DALI by `external_source`. Other formats
and whatever DALI fails to decode are left to the decoder of records.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError, one_line
from .decode import central_square
from .records import EncodedPictures, RecordReader

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

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
    """Like RecordReader, by DALI and nvJPEG; the pictures are then on the GPU.

    Args:
        device: number of the GPU; None: DALI does the same on the CPU, for tests.
        threads: of the CPU, which take part in decoding.
    """

    device: int | None = 0
    threads: int = 1

    def open(self) -> DaliDecoder:
        return DaliDecoder(self.pictures, self.device, self.threads)


class Part(NamedTuple):
    """What is needed of a picture.

    Attributes:
        area: (4,) int32: what is decoded: top, left, height, width, in pixels of the upright
            picture.
        box: what is resized of it: left, top, right, bottom, in pixels of the area.
    """

    area: np.ndarray
    box: tuple[float, float, float, float]


class DaliDecoder:
    """Takes the place of EncodedPictures for an augmentation. Decodes by nvJPEG, resizes and
    mirrors on the GPU; the pictures are tensors there, and differ from those of EncodedPictures by
    a few levels. Arguments as in DaliReader."""

    def __init__(self, pictures: EncodedPictures, device: int | None, threads: int):
        self.pictures, self._device, self._threads = pictures, device, threads
        self._pipeline: Any = None

    def sizes(self, index: np.ndarray) -> np.ndarray:
        return self.pictures.sizes(index)

    def decode(
        self,
        index: np.ndarray,
        windows: np.ndarray | None = None,
        flips: np.ndarray | None = None,
    ) -> Tensor:
        """As EncodedPictures.decode."""
        shape = len(index), self.pictures.size, self.pictures.size, 3
        place = "cpu" if self._device is None else f"cuda:{self._device}"
        out = torch.empty(shape, dtype=torch.uint8, device=place)
        for start in range(0, len(index), AT_ONCE):
            piece = slice(start, start + AT_ONCE)
            window, flip = (each if each is None else each[piece] for each in (windows, flips))
            self._decode(index[piece], window, flip, out[piece])
        return out

    def _decode(self, index: np.ndarray, windows, flips, out: Tensor) -> None:
        contents = [self.pictures.records.read(record) for record in index.tolist()]
        windows = [None] * len(index) if windows is None else windows
        flips = [False] * len(index) if flips is None else flips.astype(bool).tolist()
        sizes = [(height, width) for height, width in self.sizes(index).tolist()]
        chosen = [place for place, content in enumerate(contents) if content.startswith(JPEG)]
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
            out[place] = torch.from_numpy(np.array(found)).to(out.device)

    def _part(self, height: int, width: int, window: np.ndarray | None) -> Part:
        if window is not None:
            return Part(window.astype(np.int32), (0, 0, int(window[3]), int(window[2])))
        # The whole picture: the square is most of it, and pixels beside it count at its edges.
        area = np.array([0, 0, height, width], np.int32)
        return Part(area, central_square(width, height, self.pictures.form.crop_ratio))

    def _run(self, contents: list[bytes], parts: list[Part], flips: list[bool]) -> Tensor | None:
        """(n, size, size, 3) uint8; None if DALI fails."""
        if self._pipeline is None:
            self._pipeline = self._working_pipeline()
        areas = np.stack([part.area for part in parts])
        boxes = np.array([part.box for part in parts], np.float32)
        inputs = {
            "contents": [np.frombuffer(content, np.uint8) for content in contents],
            "start": np.ascontiguousarray(areas[:, :2]),
            "shape": np.ascontiguousarray(areas[:, 2:]),
            "box_start": np.ascontiguousarray(boxes[:, 1::-1]),  # top, left
            "box_end": np.ascontiguousarray(boxes[:, :1:-1]),  # bottom, right
            "flip": np.array(flips, np.int32),
        }
        try:
            return self._outputs(inputs)
        except RuntimeError:
            self._pipeline = None  # DALI says that it is no longer valid
            return None

    def _working_pipeline(self) -> Any:
        pipeline = make_pipeline(self.pictures.size, self._threads, self._device)
        try:
            pipeline.build()  # else a driver that is too old would look like a damaged picture
        except RuntimeError as error:
            raise UserError(
                f"NVIDIA DALI does not work here ({one_line(error, 200)}): use --loader workers, "
                "or install the DALI for the CUDA of this machine (see requirements-dali.txt)"
            ) from error
        return pipeline

    def _outputs(self, inputs: dict) -> Tensor:
        """Raises RuntimeError if DALI fails."""
        stream = None if self._device is None else torch.cuda.current_stream(self._device)
        (found,) = self._pipeline.run(stream, **inputs)
        return torch.from_dlpack(found.as_tensor())


def make_pipeline(size: int, threads: int, device: int | None) -> Pipeline:
    """Decodes `contents` within `start` and `shape` (height, width), resizes what lies from
    `box_start` to `box_end`, and mirrors where `flip` is 1.

    Args:
        size: height and width of the pictures.
        threads: of the CPU.
        device: number of the GPU; None: the CPU does everything.
    """
    from nvidia.dali import Pipeline, fn, types  # takes a second

    def given(name: str, dtype=types.INT32, ndim: int = 1):
        return fn.external_source(name=name, dtype=dtype, ndim=ndim)

    # `run` takes inputs only with a queue of 1. The loader prepares batches ahead instead.
    pipeline = Pipeline(AT_ONCE, threads, device, prefetch_queue_depth=1)
    with pipeline:
        pictures = fn.decoders.image_slice(
            given("contents", types.UINT8),
            start=given("start"),
            shape=given("shape"),
            axis_names="HW",
            device="cpu" if device is None else "mixed",
            jpeg_fancy_upsampling=True,  # as libjpeg-turbo does
        )
        pictures = fn.resize(
            pictures,
            size=(size, size),
            roi_start=given("box_start", types.FLOAT),
            roi_end=given("box_end", types.FLOAT),
            interp_type=types.INTERP_CUBIC,
            antialias=True,
        )
        pictures = fn.flip(pictures, horizontal=given("flip", ndim=0))
        pipeline.set_outputs(pictures)
    return pipeline
