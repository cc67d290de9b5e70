"""Repeated augmentation: several copies of a sample in an optimizer step."""

import numpy as np


def repeated(order: np.ndarray, repeats: int, step_size: int) -> np.ndarray:
    """The first of the samples, each `repeats` times: as many as before.

    The copies of a sample, which differ in their augmentation, lie in the same optimizer step, as
    far apart as possible, and so on different ranks if there are several; those of a sample at the
    end of a step lie in two steps unless `step_size` is a multiple of `repeats`. Hoffer et al.,
    "Augment your batch" (2020), and the sampler of DeiT, which splits each step among the ranks
    likewise.

    Args:
        order: (samples,) int64.
        step_size: samples in an optimizer step.
    """
    if repeats == 1:
        return order
    several = np.repeat(order[: -(-len(order) // repeats)], repeats)[: len(order)]
    for first in range(0, len(several), step_size):
        step = several[first : first + step_size]
        step[:] = np.concatenate([step[copy::repeats] for copy in range(repeats)])
    return several
