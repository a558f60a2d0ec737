"""Ops of the user's code get what is known of them: labels, costs, what is called.

Custom autograd.Functions, and ops of torch.library outside of torch's own namespaces that the rule
table does not have. Equal calls are looked at once.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.capture.custom_ops.labels import Known, proven, ruled
from meshfold.capture.custom_ops.probes import Call, call_of, draws, without_storage
from meshfold.capture.trace.raw_program import Flat
from meshfold.errors import UnsupportedOpError
from meshfold.ir.custom_ops import CustomOp, CustomRule, is_function
from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref
from meshfold.ops.functions import FunctionOp
from meshfold.passes.rules.table import OP_RULES

_OWN = ("aten", "prims", "prim", "meshfold", "higher_order")
"""Namespaces of ops that are nobody's own."""


def with_custom_ops(flat: Flat, rules: Sequence[CustomRule] = ()) -> Flat:
    """`flat` with what is known of its custom ops, and notes about them.

    Raises OptionError for a rule that does not hold.
    """
    graph = flat.graph.regions[0].graph
    if not any(_is_custom(op, rules) for op in graph.ops):
        return flat
    found: dict[object, Known] = {}
    ops = []
    for op in graph.ops:
        if _is_custom(op, rules):
            key = _key(graph, op)
            if key not in found:
                found[key] = _known(graph, op, rules)
            op = replace(op, custom=found[key].custom)
        ops.append(op)
    notes = dict.fromkeys(known.note for known in found.values())
    region = replace(flat.graph.regions[0], graph=replace(graph, ops=tuple(ops)))
    folded = replace(flat.graph, regions=(region,), notes=(*flat.graph.notes, *notes))
    return replace(flat, graph=folded)


def _is_custom(op: Op, rules: Sequence[CustomRule]) -> bool:
    if op.custom is not None:
        return True
    if op.target in OP_RULES or is_function(op.target):
        return False
    return op.target.partition(".")[0] not in _OWN or bool(_rules_of(op, rules))


def _rules_of(op: Op, rules: Sequence[CustomRule]) -> list[CustomRule]:
    function = op.custom.function if op.custom else None
    if isinstance(function, FunctionOp):
        return [rule for rule in rules if rule.function is function.function]
    return [rule for rule in rules if rule.function is None and rule.target == op.target]


def _known(graph: OpGraph, op: Op, rules: Sequence[CustomRule]) -> Known:
    call = call_of(graph, op)
    if op.custom is None:
        _refuse_without_backward(op, call)
    if draws(call):
        raise UnsupportedOpError(
            f"{op.target} draws random numbers, which ranks would not agree on; draw outside of it "
            "and pass the numbers in",
            op=op.target,
            source=op.source,
        )
    known = op.custom or CustomOp()
    return ruled(call, _rules_of(op, rules), known) or proven(op.target, call, known)


def _refuse_without_backward(op: Op, call: Call) -> None:
    """Refuses an op through which a gradient flows and that has no formula for it."""
    if not any(v.requires_grad for v in call.operands):
        return
    try:
        without_storage(call)
    except Exception as error:  # what else it raises, real tensors will show
        if "no autograd formula" in str(error):
            raise UnsupportedOpError(
                f"{op.target} has no backward, and a gradient flows through it; register one with "
                "torch.library.register_autograd, or detach its arguments",
                op=op.target,
                source=op.source,
            ) from error


def _key(graph: OpGraph, op: Op) -> object:
    """What equal calls have in common."""

    def form(arg: Arg) -> object:
        if isinstance(arg, Ref):
            value = graph.values[arg.index]
            return value.shape, value.dtype, value.requires_grad, value.depends
        if isinstance(arg, tuple):
            return tuple(map(form, arg))
        return type(arg).__name__, repr(arg)

    args = tuple(map(form, op.args))
    return op.target, args, tuple((name, form(arg)) for name, arg in op.kwargs)
