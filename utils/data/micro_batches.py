"""The sizes of micro-batches that an optimizer step can be cut into."""


def micro_batch_sizes(n: int, block: int = 1) -> list[int]:
    """Sizes, the largest first, for the n samples that one process has of an optimizer step.

    Each divides n evenly, so that all micro-batches are alike. Where these lie more than a factor
    of two apart (n may be a prime number), others stand between them, of which the last
    micro-batch of a step is a little smaller.

    Args:
        block: samples that are mixed with each other: sizes above it are multiples of it, those
            below cut it evenly, where they can.
    """
    blocks = [block * count for count in _even(-(-n // block))]
    return blocks + _even(block)[1:]


def _even(n: int) -> list[int]:
    sizes = [n]
    while (last := sizes[-1]) > 1:
        below = next(size for size in range(last - 1, 0, -1) if n % size == 0)
        sizes.append(below if 2 * below >= last else -(-last // 2))
    return sizes
