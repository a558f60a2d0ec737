"""Fixtures of the whole test suite."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.processes.pool import Pools
from support.readme import MANY_CORES

from meshfold.cost_models.hardware import shared_cores

# A deadline per example measures the machine; derandomized, a failure is there again next time.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ours."""
    parser.addoption(
        "--exhaustive", action="store_true", help="Tests that take a sample run all of it."
    )


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo processes, see pool.Pools. Mark tests that use it `multiprocess`."""
    found = Pools()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the command line are those of a machine with a core for each process."""
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: MANY_CORES)


def pytest_collection_finish() -> None:
    """What is imported and collected stays, and no collection of garbage need look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n`, the order of groups and what one worker runs."""
    items.sort(key=_turn)
    for item in items:
        if item.get_closest_marker("multiprocess") or not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _turn(item: pytest.Item) -> int:
    """Long groups start first: one that starts last is alone at the end."""
    if item.get_closest_marker("multiprocess"):
        return 0
    return 1 if "repo" in item.path.parts else 2


def _group(item: pytest.Item) -> str:
    """Users of pools share one worker, so that there is one pool per world size and no two jobs at
    once; so do tests that start processes of their own. The others of a file share what the
    file captures, plans and emits."""
    if item.get_closest_marker("multiprocess"):
        return "pools" if "pools" in getattr(item, "fixturenames", ()) else "processes"
    return item.nodeid.partition("::")[0]
