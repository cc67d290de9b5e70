"""How long tests wait: on a busy machine everything takes longer."""

import time

PATIENCE = 600  # seconds; only a test that fails waits for so long


def wait_until(condition, what: str = "it has not happened") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
