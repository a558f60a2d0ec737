"""Components of predicted memory."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.memory_estimate import MemoryEstimate


@given(st.lists(st.integers(0, 2**40), min_size=10, max_size=10))
def test_the_peak_is_the_sum_of_all_components_but_the_budget(amounts: list[int]) -> None:
    memory = MemoryEstimate(*amounts)
    of = {field.name: getattr(memory, field.name) for field in fields(memory)}
    assert memory.peak == sum(of.values()) - memory.capacity
    assert replace(memory, capacity=memory.peak).fits
    assert not memory.peak or not replace(memory, capacity=memory.peak - 1).fits
