"""Fixtures of the whole test suite."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.processes.pool import Pools

# A deadline per example measures the machine; derandomized, a failure is there again next time.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo processes, see pool.Pools. Mark tests that use it `multiprocess`."""
    found = Pools()
    yield found
    found.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n`, tests on several processes share one worker, so that there is one pool per world
    size and no two jobs at once; they start first, since they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)
    for item in items:
        if item.get_closest_marker("multiprocess"):
            item.add_marker(pytest.mark.xdist_group("processes"))
