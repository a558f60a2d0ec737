"""The chunked vocabulary loss: a linear layer and the cross entropy of its result as one op, which
never holds all logits (meshfold.ops.fused.linear_cross_entropy).

    loss(views(linear(x)))  ->  linear_cross_entropy(views(x))

where nothing else reads the logits or a view of them, and the views leave the last dim, the
classes, alone: what they do to rows of logits they then do to rows of x. They run as copies where
x is not laid out as the logits were. Losses are numbers of classes over logits [rows, classes].

The result is a graph like any other, with its own typings. A plan that has it says so
(Plan.chunked_loss), and meshfold.passes.split.as_planned writes it again for the model that the
plan is for; on a graph that has it already that changes nothing.
"""

import math
from dataclasses import dataclass, replace

from meshfold.ir.op_graph import Arg, FoldedGraph, Op, OpGraph, Ref, Value
from meshfold.passes.rules.ops.loss import (
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    NARROW_CROSS_ENTROPY,
)
from meshfold.passes.rules.table import OP_RULES

_LOSSES = (CROSS_ENTROPY, NARROW_CROSS_ENTROPY)
_LINEAR = "aten.linear.default"
_RESHAPE = "aten.reshape.default"
_RESHAPES = frozenset(("aten.view.default", "aten._unsafe_view.default", _RESHAPE))
_SLICE = "aten.slice.Tensor"
_COPIES = frozenset(("aten.clone.default", "aten.contiguous.default", "aten.alias.default"))


def with_chunked_losses(folded: FoldedGraph) -> FoldedGraph:
    """`folded` whose losses make their logits in chunks; `folded` itself where none can."""
    regions = tuple(replace(r, graph=_chunked(r.graph)) for r in folded.regions)
    return folded if regions == folded.regions else replace(folded, regions=regions)


@dataclass(frozen=True)
class _Head:
    """The numbers of the ops that a loss is joined with: the linear layer, and the views behind it
    in order."""

    linear: int
    views: tuple[int, ...]
    loss: int


def _chunked(graph: OpGraph) -> OpGraph:
    found = (_head(graph, k) for k, op in enumerate(graph.ops) if op.target in _LOSSES)
    for head in filter(None, found):
        # One at a time: numbers of ops and values change.
        return _chunked(_joined(graph, head))
    return graph


def _head(graph: OpGraph, loss: int) -> _Head | None:
    arguments = _arguments(graph.ops[loss])
    logits, target = arguments["self"], arguments["target"]
    if not isinstance(logits, Ref) or not isinstance(target, Ref):
        return None
    classes = graph.values[logits.index]
    if len(classes.shape) != 2 or graph.values[target.index].is_float:
        return None
    views: list[int] = []
    v = logits.index
    while _is_inside(graph, v):
        k = graph.producers[v]
        op = graph.ops[k]
        if op.target == _LINEAR:
            is_matrix = len(graph.values[op.operands[1]].shape) == 2
            return _Head(k, tuple(reversed(views)), loss) if is_matrix else None
        if not _keeps_classes(graph, op, classes.shape[1]):
            return None
        views.append(k)
        v = op.operands[0]
    return None


def _is_inside(graph: OpGraph, v: int) -> bool:
    """Whether an op makes a value and one other op alone reads it, once."""
    if graph.producers[v] < 0 or v in graph.outputs or v in dict(graph.mutations).values():
        return False
    readers = graph.users[v]
    return len(readers) == 1 and graph.ops[readers[0]].operands.count(v) == 1


def _keeps_classes(graph: OpGraph, op: Op, num_classes: int) -> bool:
    """Whether an op leaves every row of the last dim whole."""
    if len(op.operands) != 1:
        return False
    before, after = (graph.values[v].shape for v in (op.operands[0], op.outputs[0]))
    if before[-1:] != (num_classes,) or after[-1:] != (num_classes,):
        return False
    if op.target == _SLICE:
        dim = op.args[1] if len(op.args) > 1 else 0
        return isinstance(dim, int) and dim % len(before) != len(before) - 1
    if op.target in _RESHAPES:
        return math.prod(before) > 0 and isinstance(op.args[1], tuple)
    return op.target in _COPIES


def _arguments(op: Op) -> dict[str, Arg]:
    return dict(zip(OP_RULES[op.target].parameters, op.args, strict=False)) | dict(op.kwargs)


def _joined(graph: OpGraph, head: _Head) -> OpGraph:
    """The graph with one op for the loss and its linear layer, whose result is gone."""
    linear = graph.ops[head.linear]
    width = graph.values[linear.operands[0]].shape[-1]
    gone = linear.outputs[0]
    values, ops = list(graph.values), list(graph.ops)
    for k in head.views:
        op = ops[k]
        v = op.outputs[0]
        values[v] = _rows_of(graph.values[linear.operands[0]], (*values[v].shape[:-1], width))
        ops[k] = _on_rows(op, width)
    first = linear.args[0]
    ops[head.loss] = _loss(graph, head, first)
    kept = [op for k, op in enumerate(ops) if k != head.linear]
    numbers = {v: v - (v > gone) for v in range(len(values)) if v != gone}
    # The first view reads x, in place of the logits.
    assert isinstance(first, Ref), "a linear layer reads a tensor"
    numbers[gone] = numbers[first.index]
    return replace(
        graph,
        values=(*values[:gone], *values[gone + 1 :]),
        ops=tuple(op.renumbered(numbers) for op in kept),
        outputs=tuple(numbers[v] for v in graph.outputs),
        mutations=tuple((slot, numbers[v]) for slot, v in graph.mutations),
    )


def _rows_of(x: Value, shape: tuple[int, ...]) -> Value:
    return replace(x, shape=shape, master="")


def _on_rows(op: Op, width: int) -> Op:
    """A view of logits as one of x."""
    if op.target not in _RESHAPES:
        return op
    sizes = op.args[1]
    assert isinstance(sizes, tuple), "a reshape has sizes"
    last = -1 if sizes[-1] == -1 else width
    return replace(op, target=_RESHAPE, args=(op.args[0], (*sizes[:-1], last)))


def _loss(graph: OpGraph, head: _Head, x: Arg) -> Op:
    loss, linear = graph.ops[head.loss], graph.ops[head.linear]
    arguments = _arguments(loss)
    matrix, bias = linear.args[1], _arguments(linear).get("bias")
    rest: dict[str, Arg] = {
        name: arguments[name]
        for name in ("reduction", "ignore_index", "label_smoothing")
        if name in arguments
    }
    if loss.target == NARROW_CROSS_ENTROPY:
        rest["is_wide"] = True
    rows = arguments["self"] if head.views else x
    args = (rows, matrix, arguments["target"], bias, arguments.get("weight"))
    return replace(loss, target=LINEAR_CROSS_ENTROPY, args=args, kwargs=tuple(rest.items()))
