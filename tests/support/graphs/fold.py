"""Small op graphs with scopes, parameters and floats, for tests of the fold."""

from collections.abc import Sequence

from meshfold.ir.op_graph import (
    Arg,
    BufferInfo,
    Dependence,
    FoldedGraph,
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
    Value,
)

_KINDS = {
    SlotKind.VALUE: SourceKind.INPUT,
    SlotKind.PARAMETER: SourceKind.PARAMETER,
    SlotKind.BUFFER: SourceKind.BUFFER,
    SlotKind.CONSTANT: SourceKind.CONSTANT,
}
_DEPENDS = {
    SlotKind.VALUE: Dependence.BATCH,
    SlotKind.PARAMETER: Dependence.PARAMETER,
    SlotKind.BUFFER: Dependence.CONSTANT,
    SlotKind.CONSTANT: Dependence.CONSTANT,
}


class GraphBuilder:
    """Writes a flat graph op by op. Slots come first, then ops, numbered as they come."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.stacks: list[tuple[str, ...]] = []
        self.mutations: list[tuple[int, int]] = []

    def slot(
        self,
        name: str,
        kind: SlotKind = SlotKind.VALUE,
        shape: tuple[int, ...] = (4, 4),
        requires_grad: bool | None = None,
    ) -> int:
        grad = kind is SlotKind.PARAMETER if requires_grad is None else requires_grad
        self.slots.append(Slot(kind, name))
        self.values.append(Value(shape, "float32", grad, _DEPENDS[kind]))
        return len(self.values) - 1

    def parameter(self, name: str, shape: tuple[int, ...] = (4, 4)) -> int:
        return self.slot(name, SlotKind.PARAMETER, shape)

    def op(
        self,
        target: str,
        *args: Arg,
        shape: tuple[int, ...] = (4, 4),
        stack: tuple[str, ...] = (),
        results: int = 1,
    ) -> int:
        """Integers written as Ref in `args` are operands. Returns the first result."""
        first = len(self.values)
        self.values += [Value(shape, "float32", True, Dependence.BATCH)] * results
        outputs = tuple(range(first, first + results))
        self.ops.append(Op(target, args, (), outputs, stack[-1] if stack else ""))
        self.stacks.append(stack)
        return first

    def graph(self, outputs: Sequence[int]) -> OpGraph:
        return OpGraph(
            tuple(self.slots),
            tuple(self.values),
            tuple(self.ops),
            tuple(outputs),
            tuple(self.mutations),
        )

    def flat(self, outputs: Sequence[int]) -> FoldedGraph:
        """One region, one instance; slots are bound to their own names."""
        graph = self.graph(outputs)
        named = list(zip(self.slots, self.values, strict=False))
        facts = [(s.kind, (s.name, v.shape, v.dtype)) for s, v in named]
        sources = tuple(Source(_KINDS[s.kind], s.name) for s in self.slots)
        return FoldedGraph(
            (Region("A", graph),),
            (Instance(0, "", sources),),
            tuple(ParameterInfo(*f) for kind, f in facts if kind is SlotKind.PARAMETER),
            tuple(BufferInfo(*f, persistent=True) for kind, f in facts if kind is SlotKind.BUFFER),
            tuple(InputInfo(*f) for kind, f in facts if kind is SlotKind.VALUE),
            tuple(
                OutputInfo(
                    f"out{k}",
                    Source(SourceKind.VALUE, instance=0, output=k),
                    graph.values[v].shape,
                    graph.values[v].dtype,
                )
                for k, v in enumerate(outputs)
            ),
        )


def mlp_stack(
    depth: int,
    *,
    width: int = 4,
    prefix: str = "layers",
    wide_at: int = -1,
    inner_widths: Sequence[int] = (),
    scales: Sequence[float] = (),
    with_scopes: bool = True,
) -> tuple[FoldedGraph, tuple[tuple[str, ...], ...]]:
    """A stem, `depth` residual layers of five ops and a loss, with module scopes.

    wide_at: this layer has a wider inner dim; inner_widths: that of every layer; scales: a float
    per layer.
    """
    b = GraphBuilder()
    x = b.slot("x", shape=(2, width))
    stem = b.parameter("stem.weight", (width, width))
    weights = []
    for k in range(depth):
        inner = 2 * width if k == wide_at else width
        inner = inner_widths[k] if inner_widths else inner
        weights.append(
            (
                b.parameter(f"{prefix}.{k}.up.weight", (inner, width)),
                b.parameter(f"{prefix}.{k}.down.weight", (width, inner)),
            )
        )
    wide = (2, width)
    h = b.op("aten.linear.default", Ref(x), Ref(stem), shape=wide, stack=("stem",))
    for k, (up, down) in enumerate(weights):
        scope = f"{prefix}.{k}"
        inner = (2, b.values[up].shape[0])
        u = b.op("aten.linear.default", Ref(h), Ref(up), shape=inner, stack=(scope, f"{scope}.up"))
        a = b.op("aten.relu.default", Ref(u), shape=inner, stack=(scope,))
        d = b.op(
            "aten.linear.default", Ref(a), Ref(down), shape=wide, stack=(scope, f"{scope}.down")
        )
        s = b.op(
            "aten.mul.Scalar", Ref(d), scales[k] if scales else 0.5, shape=wide, stack=(scope,)
        )
        h = b.op("aten.add.Tensor", Ref(h), Ref(s), shape=wide, stack=(scope,))
    loss = b.op("aten.sum.default", Ref(h), shape=())
    stacks = tuple(b.stacks) if with_scopes else ((),) * len(b.ops)
    return b.flat([loss]), stacks
