"""The same program without chance, and without rounding noise.

    without_dropout(folded)   every dropout probability -> 0: the model in eval mode
    exact(folded)             that, every float dtype -> float64, and other random ops draw the same
                              numbers in every step and op, which the model itself can be given

Ops, values and their numbers stay, so the typing of a plan made for `folded` fits the result.
`exact` is what `meshfold verify` runs: two right programs then differ by 1e-15, and a wrong
gradient has no noise to hide in.
"""

from collections.abc import Callable
from dataclasses import replace

from meshfold.ir.op_graph import DRAWS, Arg, FoldedGraph, Hole, Instance, Op, Region, Symbol

WIDE = "float64"
ATTENTION = "aten.scaled_dot_product_attention.default"
ATTENTION_PROBABILITY = 4
DROPOUT_PROBABILITY = 1
"""Position of the probability among the arguments of every aten dropout op."""
NAMES = ("p", "dropout_p")


def exact(folded: FoldedGraph) -> FoldedGraph:
    """`folded` in float64 and without dropout."""
    certain = without_dropout(folded)
    return replace(
        certain,
        regions=tuple(map(_widened_region, certain.regions)),
        parameters=tuple(replace(p, dtype=widened(p.dtype)) for p in certain.parameters),
        buffers=tuple(replace(b, dtype=widened(b.dtype)) for b in certain.buffers),
        inputs=tuple(replace(i, dtype=widened(i.dtype)) for i in certain.inputs),
        outputs=tuple(replace(o, dtype=widened(o.dtype)) for o in certain.outputs),
    )


def without_dropout(folded: FoldedGraph) -> FoldedGraph:
    """`folded` with dropout ops that drop nothing."""
    holes = [
        {a.index for op in r.graph.ops for a in _probabilities(op) if isinstance(a, Hole)}
        for r in folded.regions
    ]
    return replace(
        folded,
        regions=tuple(_with_ops(region, _certain_op) for region in folded.regions),
        instances=tuple(_certain_instance(i, holes[i.region]) for i in folded.instances),
    )


def widened(dtype: str) -> str:
    """ "bfloat16" -> "float64", "complex64" -> "complex128"; what is no float stays."""
    if dtype.startswith("complex"):
        return "complex128"
    return WIDE if dtype.startswith(("float", "bfloat")) else dtype


def _with_ops(region: Region, change: Callable[[Op], Op]) -> Region:
    return replace(region, graph=replace(region.graph, ops=tuple(map(change, region.graph.ops))))


def _certain_instance(instance: Instance, probabilities: set[int]) -> Instance:
    floats = tuple(0.0 if k in probabilities else f for k, f in enumerate(instance.floats))
    return replace(instance, floats=floats)


def _certain_op(op: Op) -> Op:
    position = _position(op)
    if position is None:
        return op
    return replace(
        op,
        args=tuple(_zero(a) if k == position else a for k, a in enumerate(op.args)),
        kwargs=tuple((name, _zero(a) if name in NAMES else a) for name, a in op.kwargs),
    )


def _zero(probability: Arg) -> Arg:
    # A hole is filled per instance, see _certain_instance.
    return probability if isinstance(probability, Hole) else 0.0


def _widened_region(region: Region) -> Region:
    values = tuple(replace(v, dtype=widened(v.dtype), master="") for v in region.graph.values)
    region = replace(region, graph=replace(region.graph, values=values))
    return _with_ops(region, _widened_op)


def _widened_op(op: Op) -> Op:
    kwargs = tuple((name, _widened_argument(a)) for name, a in op.kwargs)
    if op.target in DRAWS:
        kwargs = (*kwargs, ("alike", True))
    return replace(op, args=tuple(map(_widened_argument, op.args)), kwargs=kwargs)


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
