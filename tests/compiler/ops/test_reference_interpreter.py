"""The interpreter is the meaning of an op graph."""

import torch

from meshfold.ir.op_graph import (
    FoldedGraph,
    Hole,
    Instance,
    Op,
    OpGraph,
    OutputInfo,
    Ref,
    Region,
    Slot,
    SlotKind,
    Source,
    SourceKind,
    Value,
)
from meshfold.ops.reference_interpreter import run_graph

V = Value((2,), "float32", True)


def scaled_twice() -> FoldedGraph:
    """y = x * w * hole, two instances with their own hole; split gives two results; s += y."""
    graph = OpGraph(
        slots=(
            Slot(SlotKind.VALUE, "x"),
            Slot(SlotKind.PARAMETER, "w"),
            Slot(SlotKind.BUFFER, "s"),
        ),
        values=(V, V, V, V, V, V, V, V),
        ops=(
            Op("aten.mul.Tensor", (Ref(0), Ref(1)), (), (3,)),
            Op("aten.mul.Scalar", (Ref(3), Hole(0)), (), (4,)),
            Op("aten.split.Tensor", (Ref(4), 1), (), (5, 6)),
            Op("aten.add.Tensor", (Ref(2), Ref(4)), (), (7,)),
        ),
        outputs=(4, 6),
        mutations=((2, 7),),
    )

    def sources(x: Source) -> tuple[Source, ...]:
        return x, Source(SourceKind.PARAMETER, "w"), Source(SourceKind.BUFFER, "s")

    first = Source(SourceKind.VALUE, instance=0, output=0)
    last = Source(SourceKind.VALUE, instance=1, output=1)
    return FoldedGraph(
        (Region("A", graph),),
        (
            Instance(0, "", sources(Source(SourceKind.INPUT, "x")), (2.0,)),
            Instance(0, "", sources(first), (3.0,)),
        ),
        (),
        (),
        (),
        (OutputInfo("y", last, (1,), "float32"),),
    )


def test_instances_are_bound_and_chained() -> None:
    x, w = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0], requires_grad=True)
    buffers = {"s": torch.zeros(2)}
    y = run_graph(scaled_twice(), {"w": w}, buffers, {}, {"x": x})["y"]
    assert y.tolist() == [2.0 * 5 * 2 * 5 * 3]
    (gradient,) = torch.autograd.grad(y.sum(), w)
    assert gradient.tolist() == [0.0, 2 * 2.0 * 5 * 2 * 3]
    # Both instances read the buffer as it was before the step.
    assert buffers["s"].tolist() == [6.0, 300.0]
