"""When gradients between instances are alive, by hand."""

from dataclasses import replace

from meshfold.cost_models.memory.live_ranges import RegionMemory
from meshfold.cost_models.memory.value_gradients import value_gradients

MAKER = RegionMemory(
    saved_bytes=0,
    saved_slots=frozenset(),
    output_roots=(0,),
    output_bytes=(30,),
    saved_outputs=(False,),
    forward_peak_bytes=0,
    backward_peak_bytes=0,
    reduction_bytes=0,
    slot_gradient_bytes=(0,),
)
READER = replace(MAKER, slot_gradient_bytes=(90, 90, 90), slot_gradient_roots=(0, 0, 0))
SOURCES = [{}, {}, {}, {k: (k, 0) for k in range(3)}]


def test_parts_of_one_storage_are_there_once_until_the_last_is_taken() -> None:
    # Four instances: the reader runs backward at moment 4, the makers at 5, 6 and 7.
    total = [0] * 8
    for first, last, num_bytes in value_gradients(SOURCES, [MAKER] * 3 + [READER]):
        for moment in range(first, last + 1):
            total[moment] += num_bytes
    # A maker counts its own 30 as what comes in: all 90 are there.
    assert [total[5] + 30, total[6] + 30, total[7] + 30] == [90, 90, 90]
    assert total[:5] == [0] * 5


def test_storages_of_their_own_end_with_their_maker() -> None:
    reader = replace(READER, slot_gradient_bytes=(30, 30, 30), slot_gradient_roots=())
    found = list(value_gradients(SOURCES, [MAKER] * 3 + [reader]))
    assert sorted(found) == [(5, 4, 30), (5, 5, 30), (5, 6, 30)]
