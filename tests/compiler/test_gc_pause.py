"""Pausing the cyclic collector."""

import gc
from collections.abc import Iterator

import pytest

from meshfold.gc_pause import collector_paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_inside_it_is_off_and_afterwards_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_an_error_ends_the_pause() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_pauses_nest() -> None:
    gc.enable()
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_decorated_function_pauses_each_time() -> None:
    gc.enable()
    inside = collector_paused()(gc.isenabled)
    assert [inside(), inside()] == [False, False]
    assert gc.isenabled()
