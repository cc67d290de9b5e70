"""How long a test waits for what must come: on a busy machine everything takes longer."""

import time

PATIENCE = 600  # seconds; only a test that fails waits for so long


def wait_until(condition, what: str = "it has not come") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
