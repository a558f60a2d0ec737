"""Gradients of the values between the instances of a program: which storages there are, and when.

A gradient is there from the backward of the last reader of its value to that of the instance that
made it, which has it as what comes in. Some that one backward makes are parts of one storage, as
those of what was concatenated are: it is there once, until the last of them is taken.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshfold.cost_models.memory.live_ranges import RegionMemory

Moments = tuple[int, int, int]
"""First and last moment, bytes."""


def value_gradients(
    sources: Sequence[Mapping[int, tuple[int, int]]], memories: Sequence[RegionMemory]
) -> Iterator[Moments]:
    """When gradients are alive outside of the instance that runs; of n instances, instance i runs
    backward at moment 2 n - 1 - i. sources: per instance, slot -> (instance, output) that made it.
    What an instance has coming in counts as its own."""
    last = 2 * len(sources) - 1
    last_reader: dict[tuple[int, int], tuple[int, int]] = {}
    for i, of in enumerate(sources):
        for k, value in of.items():
            if memories[i].slot_gradient_bytes[k]:
                last_reader[value] = i, k
    shared: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for value, (reader, k) in last_reader.items():
        roots = memories[reader].slot_gradient_roots
        shared.setdefault((reader, roots[k] if roots else k), []).append(value)
    for (reader, root), values in shared.items():
        size = memories[reader].slot_gradient_bytes[root]
        ends = {last - maker for maker, _ in values}
        yield last - reader + 1, max(ends) - 1, size
        if len(values) > 1:
            yield from _taken(values, memories, size, max(ends), last)


def _taken(
    values: Sequence[tuple[int, int]],
    memories: Sequence[RegionMemory],
    size: int,
    end: int,
    last: int,
) -> Iterator[Moments]:
    """Corrections where parts of one storage of `size` bytes are taken, the last at moment `end`:
    who has a part coming in counts that part, and there is all of it."""
    yield end, end, size
    for maker, output in values:
        yield last - maker, last - maker, -min(size, memories[maker].output_bytes[output])
