"""What holds for all tests on a GPU."""

import pytest


def pytest_runtest_setup(item):
    """After those of the files' own marks: without a GPU it is that which is said."""
    if getattr(item.config, "workerinput", {}).get("workercount", 1) > 1:
        pytest.skip("one at a time: they measure, fill and limit the GPU's memory (no -n)")
