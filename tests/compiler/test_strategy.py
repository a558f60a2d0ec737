"""Strategies as data."""

import pytest

from meshfold.strategy import RegionTyping


def test_recompute_is_none_or_full() -> None:
    assert RegionTyping((), (), ()).recompute == "none"
    assert RegionTyping((), (), (), "full").recompute == "full"
    with pytest.raises(ValueError, match="recompute is none or full, not 'selective'"):
        RegionTyping((), (), (), "selective")  # type: ignore[arg-type]
