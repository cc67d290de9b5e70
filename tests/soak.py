"""Marks what repeats a slow test with other random moments: for `make soak` alone."""

import os

import pytest

of_the_soak = [
    pytest.mark.slow,
    pytest.mark.skipif("SOAK" not in os.environ, reason="it is for `make soak`"),
]
