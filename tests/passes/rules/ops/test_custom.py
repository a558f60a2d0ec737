"""Labels that are part of an op become those of its rules."""

from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.op_graph import Op, OpGraph, Ref, Slot, SlotKind, Value
from meshfold.ir.spmd import INVARIANT, PARTIAL, REPLICATE, Shard
from meshfold.passes.rules.ops.custom import custom_labels
from meshfold.passes.rules.table import region_rules


def graph_of(custom: CustomOp | None) -> OpGraph:
    """A loss of rows with weights."""
    values = (
        Value((4, 6), "float32", True),
        Value((6,), "float32", True),
        Value((), "float32", True),
    )
    op = Op("package:Loss", (Ref(0), Ref(1)), (), (2,), custom=custom)
    slots = (Slot(SlotKind.VALUE), Slot(SlotKind.PARAMETER, "weight"))
    return OpGraph(slots, values, (op,), (2,))


def rules_of(custom: CustomOp | None) -> dict[str, tuple[object, object]]:
    return {r.name: (r.inputs, r.outputs) for r in region_rules(graph_of(custom), (2,))[0][0]}


LABELS = (("n", "k"), ("k",)), ((),)


def test_a_label_that_the_result_lacks_is_summed() -> None:
    assert rules_of(CustomOp(*LABELS, ("n",), is_linear=True)) == {
        "I": ((INVARIANT, INVARIANT), (INVARIANT,)),
        "R": ((REPLICATE, REPLICATE), (REPLICATE,)),
        "n": ((Shard(0), REPLICATE), (PARTIAL,)),
    }


def test_what_is_not_linear_takes_no_summands_of_gradients() -> None:
    assert rules_of(CustomOp(*LABELS, ("n",))).keys() == {"I", "n"}


def test_without_labels_it_runs_unsharded() -> None:
    assert custom_labels(graph_of(None).ops[0]) is None
    assert rules_of(CustomOp(*LABELS, ())).keys() == {"I"}
