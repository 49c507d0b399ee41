from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.pool import RankPool, configure_environment


@pytest.fixture(scope="session")
def _gpu_pool() -> Iterator[RankPool]:
    configure_environment()
    pool = RankPool(world_size=2, on_double=True)
    yield pool
    pool.close()


@pytest.fixture
def gpu_ranks(_gpu_pool: RankPool) -> RankPool:
    """Two ranks whose accelerator is the double."""
    return _gpu_pool
