"""The sizes of micro-batches that an optimizer step can be cut into."""


def micro_batch_sizes(n: int, block: int = 1) -> list[int]:
    """Sizes, the largest first, for the n samples that one rank has of an optimizer step.

    Each divides n evenly, so that all micro-batches are alike. Where divisors lie more than a
    factor of two apart (n may be prime), other sizes fill the gap; the last micro-batch is then
    smaller.

    Args:
        block: samples that are mixed with each other. Sizes above it are multiples of it; those
            below divide it if possible.
    """
    blocks = [block * count for count in _even(-(-n // block))]
    return blocks + _even(block)[1:]


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`; 1 if there is none."""
    return max((size for size in range(1, most + 1) if n % size == 0), default=1)


def _even(n: int) -> list[int]:
    sizes = [n]
    while (last := sizes[-1]) > 1:
        below = next(size for size in range(last - 1, 0, -1) if n % size == 0)
        sizes.append(below if 2 * below >= last else -(-last // 2))
    return sizes
