"""How the file of a picture becomes a square of 8-bit RGB."""

from __future__ import annotations

from dataclasses import dataclass

# What was done before there was a choice; caches of that keep their keys.
_BEFORE = ["crop", "dropped", 65535]


@dataclass(frozen=True)
class Form:
    """The same in training, evaluation and prediction.

    Args:
        resize_mode: "crop", the central square; "squash", the whole picture, whose sides are
            resized independently; "letterbox", the whole picture between gray bars.
        crop_ratio: side of the central square, as a fraction of the shorter side.
        transparency: "white" or "black", what transparent pictures are laid on; "dropped", their
            colours as they are stored.
        white_level: the value of 16-bit pictures that becomes white.
    """

    resize_mode: str = "crop"
    crop_ratio: float = 1.0
    transparency: str = "white"
    white_level: int = 65535

    def key(self, of_jpegs: bool = False) -> list:
        """For the keys of caches, without `crop_ratio`. JPEGs are neither transparent nor of 16
        bits."""
        values = [self.resize_mode, *([] if of_jpegs else [self.transparency, self.white_level])]
        return [] if values == _BEFORE[: len(values)] else values


USUAL = Form()
