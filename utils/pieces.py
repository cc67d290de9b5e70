"""A row of samples in pieces of one size, none of which has a single sample if it can be helped.

BatchNorm cannot take statistics of one sample, and a sample alone has no other to be mixed with.
So a lone last sample joins the piece before it: of a micro-batch, a rank's part of a step, a block
of samples that are mixed. An epoch in training leaves it out instead of enlarging a step.
"""


def has_lone_last(n: int, size: int) -> bool:
    """Whether n samples cut by `size` would end with a piece of one, after larger ones."""
    return n > size > 1 and n % size == 1


def piece_count(n: int, size: int) -> int:
    """Pieces that n samples are cut into; 0 where there are none."""
    return -(-n // size) - has_lone_last(n, size)


def piece_borders(n: int, size: int) -> list[int]:
    """Where each piece begins, and where the last one ends."""
    return [*(size * piece for piece in range(piece_count(n, size))), n]


def largest_piece(size: int) -> int:
    """No piece has more samples."""
    return size + 1
