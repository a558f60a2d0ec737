"""DTensor's own propagation of placements, compared with the rules of the table.

One process stands for rank 0 of two, whose collectives do nothing: what needs one is no opinion.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshfold.ir.op_graph import Arg, Ref, Symbol
from meshfold.ir.spmd import SpmdType
from meshfold.ir.strategy import OpTyping
from meshfold.ops.registry import torch_target
from meshfold.torch_compat.dtypes import torch_constant
from support.graphs.layouts import cut
from support.graphs.ops import SingleOp, mesh_of
from support.graphs.samples import Sample

NUM_RANKS = 2


@contextmanager
def one_of_two_ranks() -> Iterator[DeviceMesh]:
    """A mesh of a process group without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield init_device_mesh("cpu", (NUM_RANKS,))
    finally:
        dist.destroy_process_group()


def opinions(
    samples: Sequence[Sample], device_mesh: DeviceMesh
) -> tuple[Counter[str], dict[str, list[str]]]:
    """How often DTensor agrees, differs, or has nothing to say, because it has no rule there or
    would communicate; and by op every difference in words."""
    counts: Counter[str] = Counter()
    differences: dict[str, list[str]] = {}
    for name, make in samples:
        op = make()
        for typing in op.typings(NUM_RANKS):
            placements = [_placement(layout[0]) for layout in (*typing.inputs, *typing.outputs)]
            if None in placements:
                continue
            found = _found(op, typing, device_mesh)
            said = "nothing" if found is None else "agrees"
            if found is not None and not all(
                _is(theirs, layout[0]) for theirs, layout in zip(found, typing.outputs, strict=True)
            ):
                said = "differs"
                text = f"{typing.rules[0]}: {found} for {typing.outputs}"
                differences.setdefault(name.split(".")[0], []).append(text)
            counts[said] += 1
    return counts, differences


def _placement(t: SpmdType) -> Placement | None:
    """None where DTensor has no such type."""
    if t.is_shard:
        return Shard(t.dim) if t.blocks == 1 else None
    return Partial() if t.kind == "P" else Replicate()


def _is(placement: Placement, t: SpmdType) -> bool:
    if isinstance(placement, Partial):
        return t.kind == "P"
    return placement == _placement(t)


def _found(op: SingleOp, typing: OpTyping, device_mesh: Any) -> list[Placement] | None:
    """The placements of the results, if DTensor runs the op without communication."""
    mesh, generator = mesh_of(NUM_RANKS), torch.Generator().manual_seed(2)
    given = []
    for tensor, layout in zip(op.tensors, typing.inputs, strict=True):
        local = cut(tensor.detach(), layout, mesh, generator)[0]
        given.append(DTensor.from_local(local, device_mesh, [_placement(layout[0])]))
    node = op.graph.ops[0]
    args = [_filled(a, given) for a in node.args]
    kwargs = {name: _filled(a, given) for name, a in node.kwargs}
    try:
        with CommDebugMode() as communication:
            result = torch_target(node.target)(*args, **kwargs)
    except Exception:  # what it cannot do it says in many ways
        return None
    results = result if isinstance(result, list | tuple) else [result]
    if communication.get_total_counts() or not all(isinstance(x, DTensor) for x in results):
        return None
    return [x.placements[0] for x in results]


def _filled(argument: Arg, given: list[Tensor]) -> Any:
    if isinstance(argument, Ref):
        return given[argument.index]
    if isinstance(argument, Symbol):
        return torch_constant(argument, torch.device("cpu"))
    if isinstance(argument, tuple):
        return [_filled(a, given) for a in argument]
    return argument
