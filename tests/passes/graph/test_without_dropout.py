"""The exact program: same ops, float64, no dropout."""

from meshfold.ir.op_graph import (
    BufferInfo,
    FoldedGraph,
    Hole,
    InputInfo,
    Instance,
    Op,
    OpGraph,
    OutputInfo,
    ParameterInfo,
    Ref,
    Region,
    Slot,
    SlotKind,
    Source,
    SourceKind,
    Symbol,
    Value,
)
from meshfold.passes.graph.without_dropout import ATTENTION, exact


def program(
    *, floating: str, loss: str, probability: float, floats: tuple[float, ...]
) -> FoldedGraph:
    """Dropout with a probability in an argument, in a hole, in a keyword, and inside attention."""
    x = Value((4, 8), floating)
    ops = (
        Op("aten.native_dropout.default", (Ref(0), probability, True), (), (2, 3)),
        Op("aten.native_dropout.default", (Ref(2), Hole(1), True), (), (4, 5)),
        Op("aten.mul.Tensor", (Ref(4), Hole(0)), (), (6,)),
        Op("aten.alpha_dropout.default", (Ref(6),), (("p", probability), ("train", True)), (7,)),
        Op(ATTENTION, (Ref(7), Ref(7), Ref(7), None, probability), (("scale", 0.5),), (8,)),
        Op("aten._to_copy.default", (Ref(8),), (("dtype", Symbol("dtype", loss)),), (9,)),
        Op("aten.to.dtype", (Ref(1), Symbol("dtype", "int32")), (), (10,)),
    )
    mask, token = Value((4, 8), "bool"), Value((4,), "int64")
    values = (x, token, x, mask, x, mask, x, x, x, Value((4, 8), loss), Value((4,), "int32"))
    slots = (Slot(SlotKind.PARAMETER, "w"), Slot(SlotKind.VALUE, "ids"))
    sources = (Source(SourceKind.PARAMETER, "w"), Source(SourceKind.INPUT, "ids"))
    return FoldedGraph(
        regions=(Region("A", OpGraph(slots, values, ops, (9,))),),
        instances=(Instance(0, "", sources, floats),),
        parameters=(ParameterInfo("w", (4, 8), floating),),
        buffers=(BufferInfo("scale", (), floating, False), BufferInfo("count", (), "int64", True)),
        inputs=(InputInfo("ids", (4,), "int64"),),
        outputs=(OutputInfo("loss", Source(SourceKind.VALUE, "", 0, 0), (4, 8), loss),),
    )


def test_floats_are_wide_and_nothing_is_dropped() -> None:
    before = program(floating="bfloat16", loss="float32", probability=0.1, floats=(0.25, 0.2))
    expected = program(floating="float64", loss="float64", probability=0.0, floats=(0.25, 0.0))
    assert exact(before) == expected
    assert exact(expected) == expected
