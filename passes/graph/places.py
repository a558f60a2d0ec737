"""Where in the user's code an op of a folded program stands, for messages."""

from meshfold.ir.op_graph import FoldedGraph, Source, SourceKind
from meshfold.passes.graph.typed import value_name


def op_place(folded: FoldedGraph, region: int, op: int) -> str:
    """Op number `op` of a region with its line and the module that called it, in the region's first
    instance: "matmul (clip.py:12, in text.layers.0)". Without op (-1) what the region reads."""
    instance = next(i for i in folded.instances if i.region == region)
    if op < 0:
        return f"what {instance.scope or 'the model'} reads"
    found = folded.regions[region].graph.ops[op]
    name = found.target.removeprefix("aten.").removesuffix(".default")
    module = ".".join(filter(None, (instance.scope, found.scope)))
    place = ", ".join(filter(None, (found.source, module and f"in {module}")))
    return f"{name} ({place})" if place else name


def read_name(folded: FoldedGraph, region: int, value: int) -> str:
    """How people read a value of a region: what an earlier region hands over is called as there,
    in the region's first instance."""
    graph = folded.regions[region].graph
    if value >= len(graph.slots) or graph.slots[value].name:
        return value_name(graph, value)
    source = next(i for i in folded.instances if i.region == region).sources[value]
    if source.kind is not SourceKind.VALUE:
        return source.label or value_name(graph, value)
    maker = folded.instances[source.instance].region
    return read_name(folded, maker, folded.regions[maker].graph.outputs[source.output])


def made_at(folded: FoldedGraph, source: Source) -> str:
    """ " of OP (...)", the op that makes a value; nothing for what no op makes."""
    if source.kind is not SourceKind.VALUE:
        return ""
    region = folded.instances[source.instance].region
    graph = folded.regions[region].graph
    op = graph.producers[graph.outputs[source.output]]
    return f" of {op_place(folded, region, op)}" if op >= 0 else ""
