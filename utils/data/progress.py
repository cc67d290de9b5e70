"""Progress of what is done once before training, such as downloads and caches."""

import sys

from tqdm import tqdm


def progress_bar(show: bool, line: str, **options) -> tqdm:
    """A bar of tqdm on a terminal; elsewhere `line` alone. Nothing at all unless `show`."""
    terminal = sys.stderr.isatty()
    if show and not terminal:
        print(line, file=sys.stderr)
    return tqdm(**options, disable=not (show and terminal))
