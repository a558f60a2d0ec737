"""Rules of random ops. Their local implementation draws by global index (meshfold.local_ops), so
any sharding sees the same numbers, and on equal ranks they are linear."""

from meshfold.passes.rule_labels import BoundOp, OpLabels, numbered, rule


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


RANDOM_RULES = {
    "aten.dropout.default": rule("input p train", _dropout),
    "aten.native_dropout.default": rule("input p train", _dropout),
}
