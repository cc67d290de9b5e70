"""The pipeline of NVIDIA DALI that decodes JPEGs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvidia.dali import Pipeline


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
