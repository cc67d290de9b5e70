"""Steps with `found_inf` as they are taken on a GPU, where the host does not know the flag."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch


@contextlib.contextmanager
def flags_as_on_a_gpu(*modules: ModuleType) -> Iterator[None]:
    """Within it no optimizer of these modules reads `found_inf` on the host before a step, although
    it is on the CPU."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "is_on_host", lambda flag: False))
        yield
