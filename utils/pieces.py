"""Cuts samples into pieces of one size, avoiding a last piece of a single sample.

BatchNorm needs statistics of more than one sample, and mixing needs a partner. So a lone last
sample joins the piece before it, be that a micro-batch, a rank's part of a step or a block of
samples that are mixed. An epoch of training leaves it out instead of enlarging a step.
"""


def has_lone_last(n: int, size: int) -> bool:
    """Whether cutting n samples by `size` would leave a single sample at the end."""
    return n > size > 1 and n % size == 1


def piece_count(n: int, size: int) -> int:
    """Number of pieces that n samples are cut into."""
    return -(-n // size) - has_lone_last(n, size)


def piece_borders(n: int, size: int) -> list[int]:
    """Where each piece begins, and the end of the last."""
    return [*(size * piece for piece in range(piece_count(n, size))), n]


def largest_piece(size: int) -> int:
    """The most samples that a piece can have."""
    return size + 1
