"""Fixtures of the whole test suite."""

from collections.abc import Iterator

import pytest
from pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo processes, see pool.Pools. Mark tests that use it `multiprocess`."""
    found = Pools()
    yield found
    found.close()
