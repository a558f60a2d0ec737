"""Rules of random ops. Their local implementation draws by global index
(meshfold.ops.local_implementations), so any sharding sees the same numbers, and on equal ranks
dropout is linear."""

from collections.abc import Mapping
from dataclasses import replace

from meshfold.ir.op_graph import DRAWS, Arg, Draw, Op
from meshfold.passes.rules.ops.labels import BoundOp, OpLabels, numbered, rule


def _dropout(op: BoundOp) -> OpLabels:
    labels = numbered(op.value("input").shape)
    # The mask that native_dropout returns beside the values is no pending sum.
    linear = (frozenset({0}),) if len(op.outputs) == 1 else ()
    return OpLabels(
        (labels,),
        (labels,) * len(op.outputs),
        linear=linear,
        keeps_padding=frozenset(label for label, _ in filter(None, labels)),
        local="dropout",
    )


def _draw(op: BoundOp) -> OpLabels:
    """Every rank makes its shard; what is beyond its end is a number as well."""
    labels = numbered(op.outputs[0].shape)
    names = frozenset(label for label, _ in filter(None, labels))
    return OpLabels((), (labels,), keeps_padding=names, local="draw")


def may_draw(target: str, arguments: Mapping[str, Arg]) -> bool:
    """Whether a random op may draw anything: its probability of dropping is not known to be 0.
    arguments: by name."""
    if target in DRAWS:
        return True
    probability = arguments.get("dropout_p", arguments.get("p", 0.0))
    return arguments.get("train", True) is not False and probability != 0.0


def draw_of(op: Op, number: int) -> Draw | None:
    """What op `number` of a graph draws, for a graph that is cut out of it; None if nothing."""
    return op.draw or Draw(number) if op.target in RANDOM_OPS else None


def with_own_draw(op: Op, number: int) -> Op:
    """Op `number` of a graph, for a graph in which it has another number."""
    return replace(op, draw=draw_of(op, number))


RANDOM_RULES = {
    "aten.dropout.default": rule("input p train", _dropout),
    "aten.native_dropout.default": rule("input p train", _dropout),
    **{name: rule("size dtype device alike", _draw) for name in sorted(DRAWS)},
}
RANDOM_OPS = frozenset({*RANDOM_RULES, "aten.scaled_dot_product_attention.default"})
"""Ops that draw what no sharding changes; dropout only where its arguments say so."""
