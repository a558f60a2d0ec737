"""Components of predicted memory."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from meshfold.ir.memory_estimate import MemoryEstimate


@given(st.lists(st.integers(0, 2**40), min_size=11, max_size=11))
def test_the_peak_is_the_sum_of_all_components_but_the_budget(amounts: list[int]) -> None:
    memory = MemoryEstimate(*amounts)
    of = {field.name: getattr(memory, field.name) for field in fields(memory)}
    assert memory.peak == sum(of.values()) - memory.capacity
    assert replace(memory, capacity=memory.peak).fits
    assert not memory.peak or not replace(memory, capacity=memory.peak - 1).fits


@given(st.lists(st.integers(0, 2**40), min_size=11, max_size=11), st.integers(0, 2**44))
def test_the_peak_of_a_program_is_no_less_than_its_components(
    amounts: list[int], peak_bytes: int
) -> None:
    memory = MemoryEstimate(*amounts)
    own = memory.peak - memory.emitted
    found = memory.of_program(peak_bytes)
    assert found.peak == max(own, peak_bytes) and found.left == max(0, memory.capacity - own)
    assert found.of_program(0) == replace(memory, emitted=0)
