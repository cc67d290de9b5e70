"""What holds for all tests on a GPU."""

import pytest


def pytest_runtest_setup(item):
    """Runs after the files' own marks: without a GPU theirs is the reason that is given."""
    if getattr(item.config, "workerinput", {}).get("workercount", 1) > 1:
        pytest.skip("one at a time: they measure, fill and limit the GPU's memory (no -n)")
