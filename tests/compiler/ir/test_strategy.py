"""Strategies as data."""

import pytest

from meshfold.ir.strategy import SELECTIVE, KeptResults, RegionTyping, UniformStrategy


def test_recompute_is_one_of_five_words() -> None:
    assert RegionTyping((), (), ()).recompute == "none"
    assert RegionTyping((), (), (), "full").recompute == "full"
    with pytest.raises(ValueError, match="recompute is none or light or .* or full, not 'some'"):
        RegionTyping((), (), (), "some")  # type: ignore[arg-type]


def test_selective_recomputation_alone_keeps_results() -> None:
    kept = KeptResults((3,), ((1, ()),))
    for recompute in SELECTIVE:
        assert RegionTyping((), (), (), recompute, kept=kept).kept == kept
    with pytest.raises(ValueError, match="recompute full keeps no results; light or selective or"):
        RegionTyping((), (), (), "full", kept=kept)


def test_recomputation_and_offload_are_in_the_label() -> None:
    selective = UniformStrategy(dp=2, recompute="selective", offload="optimizer")
    assert selective.label == "dp2, recompute selective, offload optimizer"


def test_zero_is_in_the_label_on_whatever_axis_it_shards() -> None:
    degrees = ({"dp": 2}, {"cp": 2}, {"ep": 2}, {"dp": 2, "cp": 2})
    for sizes in degrees:
        labels = {UniformStrategy(**sizes, zero=zero).label for zero in (0, 1, 2, 3)}
        assert len(labels) == 4
    assert UniformStrategy(cp=2, zero=3).label == "cp2, zero3"
    assert UniformStrategy(tp=2, zero=3).label == "tp2"
