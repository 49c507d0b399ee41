from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.pool import RankPool, configure_environment


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks, shared by all tests; one that fails restarts them."""
    configure_environment()
    pool = RankPool(world_size=2)
    yield pool
    pool.close()
