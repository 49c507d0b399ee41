from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness import ops
from harness.pool import RankPool, configure_environment


@pytest.fixture(scope="session")
def _pool() -> Iterator[RankPool]:
    configure_environment()
    pool = RankPool(world_size=2)
    yield pool
    pool.close()


@pytest.fixture
def ranks(
    _pool: RankPool,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> Iterator[RankPool]:
    """Two ranks, shared by all tests; one that fails restarts them. Notes which stages and offload
    modes the test used, for the table of `nox -s sweep`."""
    for mark in request.node.iter_markers("builds_op"):
        ops.build(*mark.args)
    _pool.cells.clear()
    yield _pool
    for cell in sorted(_pool.cells):
        record_property("cell", cell)
