"""Where a wrong program goes wrong: the first value that differs from one process, by name.

    the captured graph, op by op in one process     every value, and its gradient
    the emitted graphs, node by node on this rank   every value in its layout, and its gradient

Forward values are compared in the order of execution, gradients in the reverse order. One rank does
not know a value that is Partial on an axis, nor the gradient of one that is Replicate there: these
are skipped, and an error in them shows at the next value that depends on them. Ranks agree on the
earliest difference that any of them found.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from meshfold.codegen.program.emitted import PLACE, RegionInstance, RegionProgram
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.spmd import INVARIANT, Layout
from meshfold.runtime.region_modes import EagerRegion, RegionMode
from meshfold.runtime.runner import ProgramRunner
from meshfold.sharding.layout import shard_of
from meshfold.training.compiled_model import CompiledModel
from meshfold.validation.captured_alone import Tensors, captured_step

ValueRef = tuple[int, int]
"""(instance, value of its region)."""


@dataclass(frozen=True)
class LocalValue:
    """A value on this rank, with its gradient in `tensor.grad` after the backward."""

    value: ValueRef
    layout: Layout
    tensor: Tensor
    is_native: bool
    """Whether it is as its op computed it, before any conversion: only then is its gradient
    complete."""


def first_divergence(
    compiled: CompiledModel,
    constants: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    batch: Mapping[str, Any],
    tolerance: float,
) -> str:
    """One line, the same on all ranks: the op behind the first difference, or that there is none.

    parameters, buffers: unsharded, of the model in one process. Called on all ranks together.
    """
    folded = compiled.program.folded
    references = _reference_values(folded, constants, parameters, buffers, batch)
    seen = _local_values(compiled, constants, batch)
    values = [s for s in seen if _is_known(s, "P")]
    gradients = [s for s in reversed(seen) if s.is_native and _is_known(s, "R")]
    assert compiled.rank_mesh is not None
    sizes, coords = compiled.program.mesh.sizes, compiled.rank_mesh.coords

    def differs(reference: Tensor | None, mine: Tensor | None, layout: Layout) -> bool:
        if reference is None or mine is None:
            return False
        expected = shard_of(reference, layout, sizes, coords)
        if any(t.padded for t in layout):
            mine = mine * shard_of(torch.ones_like(reference), layout, sizes, coords)
        scale = max(float(reference.abs().max()) if reference.numel() else 0.0, 1e-30)
        error = (mine - expected).abs().max() if mine.numel() else torch.zeros(())
        return not float(error) <= tolerance * scale

    with torch.no_grad():
        forward = _earliest(
            differs(references[s.value].detach(), s.tensor.detach(), s.layout) for s in values
        )
        backward = _earliest(
            differs(references[s.value].grad, s.tensor.grad, _gradient_layout(s.layout))
            for s in gradients
        )
    if forward is not None:
        return f"the first value that differs is {_producer(folded, values[forward].value)}"
    if backward is not None:
        value = gradients[backward].value
        return (
            f"all values agree; the first gradient that differs is that of "
            f"{_producer(folded, value)}, read by {_readers(folded, value)}"
        )
    return "every value and gradient between ops agrees: look at the reduction of parameters"


def _is_known(seen: LocalValue, unknown: str) -> bool:
    """Whether this rank has the shard that the layout says, and not a pending sum (`unknown`) or
    rows at their experts, which have another order."""
    kinds = {t.kind for t in seen.layout}
    return seen.tensor.is_floating_point() and kinds.isdisjoint((unknown, "E"))


def _gradient_layout(layout: Layout) -> Layout:
    """The gradient of a pending sum is the same on all ranks."""
    return tuple(INVARIANT if t.kind == "P" else t for t in layout)


def _earliest(found: Iterable[bool]) -> int | None:
    """The number of the first True on any rank."""
    mine = next((n for n, differs in enumerate(found) if differs), None)
    everyone: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return min((n for n in everyone if n is not None), default=None)


# One process.


def _reference_values(
    folded: FoldedGraph,
    constants: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    batch: Mapping[str, Any],
) -> dict[ValueRef, Tensor]:
    """Every value of the program, its gradient in `.grad`."""
    found: dict[ValueRef, Tensor] = {}

    def watch(instance: int, value: int, tensor: Tensor) -> None:
        found[instance, value] = _with_gradient(tensor)

    captured_step(folded, constants, parameters, buffers, batch, watch)
    return found


def _with_gradient(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.retain_grad()
    return tensor


# This rank.


class _WatchingRunner(ProgramRunner):
    """A runner that records the value of every node that stands for one of the graph."""

    def __init__(self, *arguments: Any) -> None:
        self.seen: list[LocalValue] = []
        super().__init__(*arguments)

    def training_mode(self, instance: RegionInstance) -> RegionMode:
        """Node by node, in the order of the graph: segments have the same nodes."""
        region = instance.region
        if region.recompute != "none":
            return EagerRegion(instance, region.graph, self.selective_of(instance))
        graph = self.program.folded.regions[region.region].graph
        # A chunked region is compared by its outputs alone.
        values = dict(zip(region.ops.outputs, graph.outputs, strict=True))
        if region.ops is graph:
            values = {v: v for v in range(len(graph.values))}
        watcher = _Watcher(region, instance.index, values, self.seen)
        return EagerRegion(instance, watcher.run)


class _Watcher(fx.Interpreter):
    """values: number in the model's graph of the values that are compared."""

    def __init__(
        self,
        region: RegionProgram,
        instance: int,
        values: Mapping[int, int],
        seen: list[LocalValue],
    ) -> None:
        super().__init__(region.graph)
        self._instance = instance
        self._values = values
        self._seen = seen
        self._known: set[int] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if PLACE in n.meta and n.op != "placeholder" and isinstance(result, Tensor):
            number, layout = n.meta[PLACE]
            if number not in self._values:
                return result
            value = self._values[number]
            is_native = value not in self._known
            self._known.add(value)
            ref = self._instance, value
            self._seen.append(LocalValue(ref, layout, _with_gradient(result), is_native))
        return result


def _local_values(
    compiled: CompiledModel, constants: Tensors, batch: Mapping[str, Any]
) -> list[LocalValue]:
    """The results of ops on this rank, in order, their gradients in `.grad`."""
    program = compiled.program
    runner = _WatchingRunner(program, compiled.rank_mesh, constants)
    torch.autograd.backward(compiled.run_with(runner, batch).sum())
    slots = [len(program.folded.regions[i.region].graph.slots) for i in program.folded.instances]
    # Parameters are compared elsewhere, and a gathered one is unsharded where it is read.
    return [s for s in runner.seen if s.value[1] >= slots[s.value[0]]]


# Names.


def _producer(folded: FoldedGraph, value: ValueRef) -> str:
    k, v = value
    graph = folded.regions[folded.instances[k].region].graph
    return _op_name(folded, k, graph.producers[v])


def _readers(folded: FoldedGraph, value: ValueRef) -> str:
    k, v = value
    graph = folded.regions[folded.instances[k].region].graph
    readers = [_op_name(folded, k, reader) for reader in graph.users[v]]
    return ", ".join(readers) or "another layer"


def _op_name(folded: FoldedGraph, instance: int, number: int) -> str:
    op = folded.regions[folded.instances[instance].region].graph.ops[number]
    scope = ".".join(filter(None, (folded.instances[instance].scope, op.scope)))
    return f"{op.target} (op {number}{' of ' + scope if scope else ''})"
