"""Fixtures of the whole test suite."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.processes.pool import Pools
from support.readme import MANY_CORES
from support.sampling import (
    commit_number,
    in_turns,
    is_whole_run,
    not_their_turn,
    seconds_of,
    unsampled,
    write_seconds,
)

from meshfold.cost_models.hardware import shared_cores

PROCESSES = "processes"
"""Group of the tests that start processes of their own."""

# A deadline per example measures the machine; derandomized, a failure is there again next time.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ours."""
    parser.addoption(
        "--exhaustive", action="store_true", help="Tests that take a sample run all of it."
    )
    parser.addoption(
        "--every-turn", action="store_true", help="Long and slow tests all run, not their turn."
    )
    parser.addoption(
        "--write-seconds", action="store_true", help="Long tests all run, and seconds.json is made."
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure tests where that was asked for."""
    if config.getoption("write_seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds())


class Seconds:
    """What tests take, of the controller of workers."""

    def __init__(self) -> None:
        self.by_case: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the setup, the call and the teardown."""
        self.by_case[report.nodeid.partition("@")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the means."""
        by_test: dict[str, list[float]] = {}
        for case, seconds in self.by_case.items():
            by_test.setdefault(case.partition("[")[0], []).append(seconds)
        write_seconds(by_test)


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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs by default; under `-n`, what one worker runs, and what starts first."""
    if not config.getoption("exhaustive"):
        left = unsampled(items) | not_their_turn(items, commit_number())
        is_every = config.getoption("every_turn") or config.getoption("write_seconds")
        if is_whole_run(config.args) and not is_every:
            left |= in_turns([item for item in items if item not in left], commit_number())
        left -= {item for item in items if any(a.endswith(item.nodeid) for a in config.args)}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    groups = {item: _group(item) for item in items}
    seconds: Counter[str] = Counter()
    is_quick = "not slow" in config.getoption("markexpr")
    for item, group in groups.items():
        if not (is_quick and item.get_closest_marker("slow")):
            seconds[group] += seconds_of(item)
    # Long groups start first: one that starts last is alone at the end.
    items.sort(key=lambda item: (groups[item] != PROCESSES, -seconds[groups[item]], groups[item]))
    for item, group in groups.items():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    """A file is run by one worker, so that its tests share what it captures, plans and emits; files
    may share a worker by a mark. Tests that start processes of their own are one group: two of them
    at once would have more processes than the machine has cores, and some watch the clock."""
    named = item.get_closest_marker("xdist_group")
    if named:
        return str(named.args[0])
    if item.get_closest_marker("multiprocess") and "pools" not in getattr(item, "fixturenames", ()):
        return PROCESSES
    return item.nodeid.partition("::")[0]
