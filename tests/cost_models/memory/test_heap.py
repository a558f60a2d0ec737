"""Storages and their owners."""

from meshfold.cost_models.memory.heap import Heap


def test_a_storage_goes_with_its_last_owner_and_the_peak_stays() -> None:
    heap = Heap()
    first = heap.allocate(10)
    heap.retain(first)
    second = heap.allocate(5)
    heap.release(first)
    assert heap.current_bytes == 15
    heap.release(first)
    heap.release(second)
    assert (heap.current_bytes, heap.peak_bytes) == (0, 15)


def test_peaks_are_taken_one_after_the_other() -> None:
    heap = Heap()
    storage = heap.allocate(10)
    heap.touch(7)
    assert heap.take_peak() == 17
    heap.resize(storage, 4)
    assert heap.take_peak() == 10
    assert heap.take_peak() == 4
