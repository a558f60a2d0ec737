"""Where a wrong program goes wrong: the first value that differs from one process, by name.

    the captured graph, op by op in one process     every value, and its gradient
    the emitted graphs, node by node on this rank   every value in its layout, and its gradient

Forward values are compared in the order in which they are made, gradients in the reverse order.
What is Partial on an axis is not known on one rank, nor is the gradient of what is Replicate there:
these are passed over, and show at the next value that depends on them. Ranks agree on the earliest
place that any of them found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from meshfold.codegen.program.emitted import PLACE, RegionProgram
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.ops.reference_interpreter import run_graph
from meshfold.runtime.batches import flatten
from meshfold.runtime.runner import ProgramRunner
from meshfold.sharding.layout import shard_of
from meshfold.training.compiled_model import CompiledModel

Tensors = Mapping[str, Tensor]
Value = tuple[int, int]
"""(instance, value of its region)."""


@dataclass(frozen=True)
class _Seen:
    """A value on this rank. is_native: as its op made it, so that its gradient is the whole one."""

    value: Value
    layout: Layout
    tensor: Tensor
    is_native: bool


def first_departure(
    compiled: CompiledModel,
    constants: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    batch: Mapping[str, Any],
    tolerance: float,
) -> str:
    """One line, the same on all ranks: the op behind the first difference, or that there is none.

    parameters, buffers: of the model in one process, whole. Called on all ranks together.
    """
    folded = compiled.program.folded
    wholes = _whole_values(folded, constants, parameters, buffers, batch)
    seen = _seen_values(compiled, constants, batch)
    sizes, coords = compiled.program.mesh.sizes, _coords(compiled)

    def differs(whole: Tensor | None, mine: Tensor | None, layout: Layout) -> bool:
        if whole is None or mine is None:
            return False
        expected = shard_of(whole, layout, sizes, coords)
        if any(t.padded for t in layout):
            mine = mine * shard_of(torch.ones_like(whole), layout, sizes, coords)
        scale = max(float(whole.abs().max()) if whole.numel() else 0.0, 1e-30)
        error = (mine - expected).abs().max() if mine.numel() else torch.zeros(())
        return not float(error) <= tolerance * scale

    with torch.no_grad():
        forward = _earliest(
            differs(wholes[s.value].detach(), s.tensor.detach(), s.layout)
            for s in seen
            if _is_known(s, "P")
        )
        backward = _earliest(
            differs(wholes[s.value].grad, s.tensor.grad, _of_gradient(s.layout))
            for s in reversed(seen)
            if s.is_native and _is_known(s, "R")
        )
    if forward is not None:
        place = [s for s in seen if _is_known(s, "P")][forward]
        return f"the first value that differs is {_made_by(folded, place.value)}"
    if backward is not None:
        place = [s for s in reversed(seen) if s.is_native and _is_known(s, "R")][backward]
        return (
            f"all values agree; the first gradient that differs is that of "
            f"{_made_by(folded, place.value)}, read by {_read_by(folded, place.value)}"
        )
    return "every value and gradient between ops agrees: look at the reduction of parameters"


def _is_known(seen: _Seen, unknown: str) -> bool:
    """Whether this rank has the part of the value that its layout says, in the order of the whole:
    rows that are with their experts have another."""
    kinds = {t.kind for t in seen.layout}
    return seen.tensor.is_floating_point() and kinds.isdisjoint((unknown, "E"))


def _of_gradient(layout: Layout) -> Layout:
    """That of a pending sum is the same everywhere."""
    return tuple(INVARIANT if t.kind == "P" else t for t in layout)


def _earliest(found: Iterable[bool]) -> int | None:
    """The number of the first True on any rank."""
    mine = next((n for n, differs in enumerate(found) if differs), None)
    everyone: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return min((n for n in everyone if n is not None), default=None)


def _coords(compiled: CompiledModel) -> Sequence[int]:
    assert compiled.rank_mesh is not None
    return compiled.rank_mesh.coords


# One process.


def _whole_values(
    folded: FoldedGraph,
    constants: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    batch: Mapping[str, Any],
) -> dict[Value, Tensor]:
    """Every value of the program, its gradient in `.grad`."""
    found: dict[Value, Tensor] = {}

    def watch(instance: int, value: int, tensor: Tensor) -> None:
        found[instance, value] = _kept(tensor)

    leaves = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    inputs = {n: x for n, x in flatten(batch) if isinstance(x, Tensor)}
    outputs = run_graph(folded, leaves, copies, constants, inputs, watch)
    torch.autograd.backward(outputs[folded.outputs[0].name].sum())
    return found


def _kept(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.retain_grad()
    return tensor


# This rank.


class _WatchingRunner(ProgramRunner):
    """Runs every region node by node and keeps what its nodes stand for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[_Seen] = []

    def is_scheduled(self, region: RegionProgram) -> bool:
        """Node by node, in the order of the graph: pieces hold the same nodes."""
        return False

    def call(self, instance: int, region: RegionProgram, arguments: Sequence[Any]) -> Any:
        number = self.program.folded.instances[instance].region
        graph = self.program.folded.regions[number].graph
        # Of a region in parts: what leaves it.
        values = dict(zip(region.ops.outputs, graph.outputs, strict=True))
        if region.ops is graph:
            values = {v: v for v in range(len(graph.values))}
        return _Watcher(region, instance, values, self.seen).run(*arguments)


class _Watcher(fx.Interpreter):
    """values: number in the model's graph of the values that are compared."""

    def __init__(
        self, region: RegionProgram, instance: int, values: Mapping[int, int], seen: list[_Seen]
    ) -> None:
        super().__init__(region.graph)
        self._instance = instance
        self._values = values
        self._seen = seen
        self._known: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if PLACE in n.meta and n.op != "placeholder" and isinstance(made, Tensor):
            number, layout = n.meta[PLACE]
            if number not in self._values:
                return made
            value = self._values[number]
            is_native = value not in self._known
            self._known.add(value)
            place = self._instance, value
            self._seen.append(_Seen(place, layout, _kept(made), is_native))
        return made


def _seen_values(
    compiled: CompiledModel, constants: Tensors, batch: Mapping[str, Any]
) -> list[_Seen]:
    """What this rank makes of the values that ops make, in order, its gradients in `.grad`."""
    program = compiled.program
    runner = _WatchingRunner(program, compiled.rank_mesh, constants)
    torch.autograd.backward(compiled.run_with(runner, batch).sum())
    slots = [len(program.folded.regions[i.region].graph.slots) for i in program.folded.instances]
    # Parameters are compared elsewhere, and where they come out of a bucket they are used whole.
    return [s for s in runner.seen if s.value[1] >= slots[s.value[0]]]


# Names.


def _made_by(folded: FoldedGraph, value: Value) -> str:
    k, v = value
    graph = folded.regions[folded.instances[k].region].graph
    return _op_name(folded, k, graph.producers[v])


def _read_by(folded: FoldedGraph, value: Value) -> str:
    k, v = value
    graph = folded.regions[folded.instances[k].region].graph
    readers = [_op_name(folded, k, reader) for reader in graph.users[v]]
    return ", ".join(readers) or "another layer"


def _op_name(folded: FoldedGraph, instance: int, number: int) -> str:
    op = folded.regions[folded.instances[instance].region].graph.ops[number]
    scope = ".".join(filter(None, (folded.instances[instance].scope, op.scope)))
    return f"{op.target} (op {number}{' of ' + scope if scope else ''})"
