"""Parameters of an instance, summed by hand."""

from dataclasses import replace

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.parameter_uses import ParameterSums, ParameterUse

NOTHING = RegionMemory(0, frozenset(), (), (), (), 0, 0, 0, slot_gradient_bytes=(8, 8, 0))
GATHERED = ParameterUse(0, 5, 20, 24, 5, "gathered")


def test_gathered_bytes_are_in_flight_one_region_longer() -> None:
    sums = ParameterSums(NOTHING, [GATHERED, replace(GATHERED, slot=1, how="reduced")])
    assert (sums.gathered, sums.flat, sums.result) == (20, 24 + 24, 5)
    assert (sums.resident, sums.in_flight) == (5 + 5, 24)


def test_what_has_no_gradient_is_gathered_alone() -> None:
    sums = ParameterSums(NOTHING, [replace(GATHERED, slot=2)])
    assert (sums.gathered, sums.flat, sums.resident, sums.in_flight) == (20, 0, 0, 0)


def test_a_gradient_that_leaves_is_in_flight() -> None:
    use = replace(GATHERED, how="direct", gradient_bytes=0)
    assert (use.resident_bytes, use.in_flight_bytes) == (0, 5)


def test_a_parameter_with_several_uses_is_apart() -> None:
    sums = ParameterSums(NOTHING, [replace(GATHERED, name="table")])
    assert sums.resident == 0 and [use.name for use in sums.shared] == ["table"]
