import pytest
from distributed.world import Worlds


@pytest.fixture(scope="session")
def worlds():
    """worlds(n).run(case, ...): see world.py."""
    groups = Worlds()
    yield groups
    groups.close()
