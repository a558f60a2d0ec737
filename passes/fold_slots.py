"""How the slots of a run are fed from one instance to the next.

shared      the same source in every instance: a mask, a rotary table, a tied parameter
own         a parameter, buffer or constant of the instance itself
carried     output k of the instance before; the first instance gets it from elsewhere
periodic    the sources of `period` instances, over and over: the masks of Gemma
each        anything else: a skip connection of a U-Net
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshfold.ir.op_graph import FoldedGraph, Source, SourceKind


class SlotFlow(StrEnum):
    SHARED = "shared"
    OWN = "own"
    CARRIED = "carried"
    PERIODIC = "periodic"
    EACH = "each"


@dataclass(frozen=True, slots=True)
class SlotClass:
    """`output` belongs to CARRIED, `period` to PERIODIC."""

    flow: SlotFlow
    output: int = -1
    period: int = 0


def slot_classes(folded: FoldedGraph, first: int, count: int) -> tuple[SlotClass, ...]:
    """One class per slot of the region whose instances are first..first+count-1.

    Raises ValueError if these are not instances of one region.
    """
    instances = folded.instances[first : first + count]
    if len({i.region for i in instances}) != 1:
        raise ValueError(f"instances {first} to {first + count - 1} are not of one region")
    columns = zip(*(i.sources for i in instances), strict=True)
    return tuple(_slot_class(column, first) for column in columns)


def _slot_class(sources: Sequence[Source], first: int) -> SlotClass:
    if len(set(sources)) == 1:
        return SlotClass(SlotFlow.SHARED)
    later = sources[1:]
    before = [(s.kind, s.instance) for s in later]
    expected = [(SourceKind.VALUE, first + k) for k in range(len(later))]
    outputs = {s.output for s in later}
    if before == expected and len(outputs) == 1:
        return SlotClass(SlotFlow.CARRIED, output=outputs.pop())
    for period in range(2, len(sources) // 2 + 1):
        if sources[:-period] == sources[period:]:
            return SlotClass(SlotFlow.PERIODIC, period=period)
    if all(s.kind not in (SourceKind.VALUE, SourceKind.INPUT) for s in sources):
        return SlotClass(SlotFlow.OWN)
    return SlotClass(SlotFlow.EACH)
