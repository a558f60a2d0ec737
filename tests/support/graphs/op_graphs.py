"""Hand-written op graphs for the tests of the search. No torch."""

from dataclasses import replace

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import (
    Arg,
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


class GraphBuilder:
    """Writes an OpGraph op by op; every method returns the number of a value."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.slots: list[Slot] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def slot(
        self,
        *shape: int,
        kind: SlotKind = SlotKind.VALUE,
        name: str = "",
        depends: Dependence = Dependence.BATCH,
    ) -> int:
        assert not self.ops, "slots come first"
        self.slots.append(Slot(kind, name))
        self.values.append(Value(shape, self.dtype, True, depends))
        return len(self.values) - 1

    def parameter(self, *shape: int, name: str = "weight") -> int:
        return self.slot(*shape, kind=SlotKind.PARAMETER, name=name, depends=Dependence.PARAMETER)

    def op(self, target: str, args: tuple[Arg, ...], shape: tuple[int, ...]) -> int:
        self.values.append(Value(shape, self.dtype, True, Dependence.BATCH))
        out = len(self.values) - 1
        self.ops.append(Op(f"aten.{target}", args, (), (out,), scope=f"op{len(self.ops)}"))
        return out

    def linear(self, x: int, weight: int) -> int:
        shape = (*self.values[x].shape[:-1], self.values[weight].shape[0])
        return self.op("linear.default", (Ref(x), Ref(weight)), shape)

    def relu(self, x: int) -> int:
        return self.op("relu.default", (Ref(x),), self.values[x].shape)

    def add(self, a: int, b: int) -> int:
        return self.op("add.Tensor", (Ref(a), Ref(b)), self.values[a].shape)

    def build(self, *outputs: int) -> OpGraph:
        return OpGraph(tuple(self.slots), tuple(self.values), tuple(self.ops), outputs)


def mlp(batch: int = 4, width: int = 8, hidden: int = 16, *, residual: bool = False) -> OpGraph:
    """linear, relu, linear [, + input]; slots are (x, up, down)."""
    b = GraphBuilder()
    x = b.slot(batch, width)
    up, down = b.parameter(hidden, width, name="up"), b.parameter(width, hidden, name="down")
    y = b.linear(b.relu(b.linear(x, up)), down)
    return b.build(b.add(y, x) if residual else y)


def three_heads(batch: int = 4, width: int = 8) -> OpGraph:
    """Three products of one value, added up: a value with three users."""
    b = GraphBuilder()
    x = b.slot(batch, width)
    weights = [b.parameter(width, width, name=name) for name in "abc"]
    x = b.relu(x)
    first, second, third = (b.linear(x, w) for w in weights)
    return b.build(b.add(b.add(first, second), third))


def without_host(spec: ClusterSpec) -> ClusterSpec:
    """A cluster whose hosts issue ops at once."""
    groups = (replace(g, device=replace(g.device, host_op_s=0.0)) for g in spec.groups)
    return replace(spec, groups=tuple(groups))


def costs_on(dp: int, tp: int, cluster: str = "dgx-h100x2") -> tuple[Mesh, CostModel, ClusterSpec]:
    """A mesh of dp x tp on a preset and its cost model; no kernel waits for the host, which is
    longer than all of graphs as small as those of tests."""
    spec = without_host(resolve_cluster(cluster))
    mesh = build_mesh(spec, dp, tp)
    return mesh, CostModel(spec, mesh), spec


def folded_stack(num_layers: int = 2, *, tied: bool = False) -> FoldedGraph:
    """Input [4, 8, 16], a product, `num_layers` equal residual layers, a product, all of it by
    hand: regions A, B, C. tied: A and C share their parameter."""
    ends = []
    for _ in range(2):
        b = GraphBuilder()
        x = b.slot(4, 8, 16)
        ends.append(b.build(b.linear(x, b.parameter(16, 16, name="weight"))))
    b = GraphBuilder()
    x = b.slot(4, 8, 16)
    up, down = b.parameter(32, 16, name="up"), b.parameter(16, 32, name="down")
    layer = b.build(b.add(x, b.linear(b.relu(b.linear(x, up)), down)))

    def parameter(name: str) -> Source:
        return Source(SourceKind.PARAMETER, name)

    instances = [Instance(0, "first", (Source(SourceKind.INPUT, "x"), parameter("first")))]
    for k in range(num_layers):
        carried = Source(SourceKind.VALUE, instance=k, output=0)
        weights = parameter(f"{k}.up"), parameter(f"{k}.down")
        instances.append(Instance(1, f"layers.{k}", (carried, *weights)))
    last = Source(SourceKind.VALUE, instance=num_layers, output=0)
    instances.append(Instance(2, "last", (last, parameter("first" if tied else "last"))))
    square = ((16, 16), "float32")
    parameters = [ParameterInfo("first", *square)]
    for k in range(num_layers):
        parameters.append(ParameterInfo(f"{k}.up", (32, 16), "float32"))
        parameters.append(ParameterInfo(f"{k}.down", (16, 32), "float32"))
    if not tied:
        parameters.append(ParameterInfo("last", *square))
    result = Source(SourceKind.VALUE, instance=num_layers + 1, output=0)
    return FoldedGraph(
        regions=tuple(map(Region, "ABC", (ends[0], layer, ends[1]))),
        instances=tuple(instances),
        parameters=tuple(parameters),
        buffers=(),
        inputs=(InputInfo("x", (4, 8, 16), "float32"),),
        outputs=(OutputInfo("loss", result, (4, 8, 16), "float32"),),
    )
