"""The tests of benchmarks, which few people run, run with the slow ones."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
