"""A folded graph as one flat region: what the fold is checked against."""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.ir.op_graph import (
    Arg,
    FoldedGraph,
    Hole,
    Instance,
    Op,
    OpGraph,
    OutputInfo,
    Ref,
    Region,
    Source,
    SourceKind,
    Value,
)
from meshfold.passes.fold.assemble import region_name, rewrite_op, slot_of


def expand(folded: FoldedGraph) -> FoldedGraph:
    """The same program as one flat region with one instance: op for op what was folded."""
    graphs = [folded.regions[i.region].graph for i in folded.instances]
    leaves = _leaves(folded, graphs)
    number: dict[Source, int] = {leaf: k for k, leaf in enumerate(leaves)}
    values: list[Value] = list(leaves.values())
    ops: list[Op] = []
    mutations: list[tuple[int, int]] = []
    for k, (instance, graph) in enumerate(zip(folded.instances, graphs, strict=True)):
        local = {slot: number[source] for slot, source in enumerate(instance.sources)}
        for op in graph.ops:
            for v in op.outputs:
                local[v] = len(values)
                values.append(graph.values[v])
            ops.append(_bind(op, instance, local))
        for output, v in enumerate(graph.outputs):
            number[Source(SourceKind.VALUE, instance=k, output=output)] = local[v]
        mutations += [(local[slot], local[v]) for slot, v in graph.mutations]
    outputs = tuple(dict.fromkeys(number[out.source] for out in folded.outputs))
    flat = OpGraph(
        tuple(slot_of(leaf, "") for leaf in leaves),
        tuple(values),
        tuple(ops),
        outputs,
        tuple(mutations),
    )
    return replace(
        folded,
        regions=(Region(region_name(0), flat),),
        instances=(Instance(0, "", tuple(leaves)),),
        outputs=tuple(_flat_output(out, number, outputs) for out in folded.outputs),
    )


def _flat_output(
    out: OutputInfo, number: dict[Source, int], outputs: tuple[int, ...]
) -> OutputInfo:
    position = outputs.index(number[out.source])
    return replace(out, source=Source(SourceKind.VALUE, instance=0, output=position))


def _leaves(folded: FoldedGraph, graphs: Sequence[OpGraph]) -> dict[Source, Value]:
    """What comes from outside the program: in order of use by ops, then outputs, then updates."""
    pairs = [*zip(folded.instances, graphs, strict=True)]
    used = [
        (i.sources[v], g.values[v])
        for i, g in pairs
        for op in g.ops
        for v in op.operands
        if v < len(g.slots)
    ]
    known = {s: g.values[v] for i, g in pairs for v, s in enumerate(i.sources)}
    used += [(out.source, known.get(out.source, _output_value(out))) for out in folded.outputs]
    used += [(i.sources[slot], g.values[slot]) for i, g in pairs for slot, _ in g.mutations]
    leaves: dict[Source, Value] = {}
    for source, value in used:
        if source.kind is not SourceKind.VALUE:
            leaves.setdefault(source, value)
    return leaves


def _output_value(out: OutputInfo) -> Value:
    return Value(out.shape, out.dtype)


def _bind(op: Op, instance: Instance, number: dict[int, int]) -> Op:
    def rewrite(arg: Arg) -> Arg:
        if isinstance(arg, Hole):
            return instance.floats[arg.index]
        return Ref(number[arg.index]) if isinstance(arg, Ref) else arg

    scope = ".".join(part for part in (instance.scope, op.scope) if part)
    return rewrite_op(op, rewrite, number, scope)
