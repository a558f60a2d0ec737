"""The same program without rounding noise and without chance: float64 throughout, no dropout.

    exact(folded)   every float dtype -> float64, every dropout probability -> 0

Ops, values and their numbers stay, so the typing of a plan made for `folded` fits the result. This
is what `meshfold verify` runs: two right programs then differ by 1e-15, and a wrong gradient has no
noise to hide in.
"""

from dataclasses import replace

from meshfold.opgraph import Arg, FoldedGraph, Hole, Instance, Op, Region, Symbol

WIDE = "float64"
ATTENTION = "aten.scaled_dot_product_attention.default"
ATTENTION_PROBABILITY = 4
DROPOUT_PROBABILITY = 1
"""Position of the probability among the arguments of every aten dropout op."""
NAMES = ("p", "dropout_p")


def exact(folded: FoldedGraph) -> FoldedGraph:
    """`folded` in float64 and without dropout."""
    holes = [
        {a.index for op in r.graph.ops for a in _probabilities(op) if isinstance(a, Hole)}
        for r in folded.regions
    ]
    return replace(
        folded,
        regions=tuple(_region(region) for region in folded.regions),
        instances=tuple(_instance(i, holes[i.region]) for i in folded.instances),
        parameters=tuple(replace(p, dtype=widened(p.dtype)) for p in folded.parameters),
        buffers=tuple(replace(b, dtype=widened(b.dtype)) for b in folded.buffers),
        inputs=tuple(replace(i, dtype=widened(i.dtype)) for i in folded.inputs),
        outputs=tuple(replace(o, dtype=widened(o.dtype)) for o in folded.outputs),
    )


def widened(dtype: str) -> str:
    """ "bfloat16" -> "float64"; what is no float stays."""
    return WIDE if dtype.startswith(("float", "bfloat")) else dtype


def _region(region: Region) -> Region:
    graph = region.graph
    values = tuple(replace(v, dtype=widened(v.dtype)) for v in graph.values)
    return replace(region, graph=replace(graph, values=values, ops=tuple(map(_op, graph.ops))))


def _instance(instance: Instance, probabilities: set[int]) -> Instance:
    floats = tuple(0.0 if k in probabilities else f for k, f in enumerate(instance.floats))
    return replace(instance, floats=floats)


def _op(op: Op) -> Op:
    position = _position(op)
    has_probability = position is not None
    return replace(
        op,
        args=tuple(_argument(a, is_probability=k == position) for k, a in enumerate(op.args)),
        kwargs=tuple(
            (name, _argument(a, is_probability=has_probability and name in NAMES))
            for name, a in op.kwargs
        ),
    )


def _argument(argument: Arg, *, is_probability: bool) -> Arg:
    if is_probability:
        # A hole is filled per instance, see _instance.
        return argument if isinstance(argument, Hole) else 0.0
    return _widened_argument(argument)


def _widened_argument(argument: Arg) -> Arg:
    if isinstance(argument, Symbol) and argument.kind == "dtype":
        return Symbol("dtype", widened(argument.text))
    if isinstance(argument, tuple):
        return tuple(map(_widened_argument, argument))
    return argument


def _probabilities(op: Op) -> list[Arg]:
    position = _position(op)
    if position is None:
        return []
    return [*op.args[position : position + 1], *(a for n, a in op.kwargs if n in NAMES)]


def _position(op: Op) -> int | None:
    if op.target == ATTENTION:
        return ATTENTION_PROBABILITY
    return DROPOUT_PROBABILITY if "dropout" in op.target else None
