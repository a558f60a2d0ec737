"""Ops of the user's code: dim labels that are part of the op itself (meshfold.ir.custom_ops).

    RMSNorm as a Function    x[b, s, .], weight[.] -> [b, s, .]        ranks may share b and s
    fused linear and loss    x[n, .], weight[., .], y[n] -> []         n is summed

A label that no rank may share is none. Where a result lacks a shared label it is a pending sum.
"""

from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.op_graph import Op
from meshfold.passes.rules.ops.labels import Dims, OpLabels, dim_label


def custom_labels(op: Op) -> OpLabels | None:
    """Labels of an op of the user's; None if ranks may share nothing of it."""
    known = op.custom
    if known is None or not known.shards:
        return None

    def dims(names: tuple[str, ...]) -> Dims:
        return tuple(dim_label(name) if name in known.shards else None for name in names)

    return OpLabels(
        inputs=tuple(map(dims, known.operands)),
        outputs=tuple(map(dims, known.results)),
        summed=_summed(known),
        takes_summands=known.is_linear,
    )


def _summed(known: CustomOp) -> frozenset[str]:
    lacking = (set(known.shards).difference(names) for names in known.results)
    return frozenset(label for labels in lacking for label in labels)
