"""Which copies of stored parameters a device has: in the dtype that its ops read, where one use
reads it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.ir.op_graph import SourceKind
from meshfold.torch_compat.dtypes import torch_dtype

PAGE_BYTES = 32 << 20
"""Of a page, unless one parameter is larger: copies of some milliseconds on a PCIe link, so that
the first layers run while the last ones are on their way. A round figure."""


@dataclass(frozen=True)
class DeviceCopy:
    """Of one parameter. has_one_use: one use makes all of its gradient. is_shared: other devices
    hold it, too, and its gradient is the sum of theirs. comes_by_layer: it has memory only while
    the layer that reads it runs."""

    name: str
    dtype: torch.dtype
    has_one_use: bool = True
    is_shared: bool = False
    comes_by_layer: bool = False


def device_copies(
    programs: Sequence[EmittedProgram],
    names: Iterable[str],
    shared: Iterable[str],
    by_layer: Iterable[str] = (),
) -> list[DeviceCopy]:
    """The copies of the parameters `names`, in the order in which the programs of a rank first read
    them. shared: names of parameters that other stages hold, too; they and those with several uses
    are copied as they are stored, since their gradients are added up on the device. by_layer: of
    those that come layer by layer; what several uses read stays all the same."""
    stored = {
        p.name: torch_dtype(p.dtype) for program in programs for p in program.folded.parameters
    }
    wanted, others, coming = set(names), set(shared), set(by_layer)
    found = []
    for name, dtypes in _reads(programs).items():
        if name in wanted:
            is_shared = name in others
            has_one_use = len(dtypes) == 1 and not is_shared
            dtype = torch_dtype(dtypes[0]) if has_one_use and dtypes[0] else stored[name]
            comes_by_layer = has_one_use and name in coming
            found.append(DeviceCopy(name, dtype, has_one_use, is_shared, comes_by_layer))
    return found


def _reads(programs: Sequence[EmittedProgram]) -> Mapping[str, list[str]]:
    """The dtype of every use of a parameter; "": as it is stored."""
    found: dict[str, list[str]] = {}
    for program in programs:
        for k, instance in enumerate(program.folded.instances):
            region = program.region_of(k)
            for group in region.groups:
                for name in program.parameters_of(k, group):
                    found.setdefault(name, []).append(group.dtype)
            for slot in region.direct:
                if instance.sources[slot].kind is SourceKind.PARAMETER:
                    found.setdefault(instance.sources[slot].name, []).append("")
    return found


def pages(sizes_bytes: Mapping[str, int], page_bytes: int = PAGE_BYTES) -> list[list[str]]:
    """Names in their order, divided so that a page has at most page_bytes, or one name."""
    found: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes_bytes.items():
        if not found or num_bytes > room:
            found.append([])
            room = page_bytes
        found[-1].append(name)
        room -= num_bytes
    return found
