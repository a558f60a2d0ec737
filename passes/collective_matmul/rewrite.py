"""The graph of a region with products as collective matmuls.

    x: Shard -> Replicate -> products    becomes all_gather_matmul: all products that read what was
                                         gathered, if nothing else reads it
    product -> Partial -> Shard          becomes matmul_reduce_scatter, if all read those shards

where the weights are sharded by outputs, or by inputs, on that axis
(passes/rules/ops/collective_matmul.py). Nothing else of the region changes: what else reads or
makes these values has the layouts that it had. A product is aten.linear, or aten.addmm between two
views, as a Conv1D of Hugging Face is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshfold.cost_models.op_costs.compute import op_name
from meshfold.errors import PlanMismatchError
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import Arg, Op, OpGraph, Ref
from meshfold.ir.plan import RegionPlan
from meshfold.ir.spmd import PARTIAL, REPLICATE, Layout, SpmdType
from meshfold.ir.strategy import KeptResults, OpTyping, RegionTyping
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.rules.ops.collective_matmul import (
    ALL_GATHER_MATMUL,
    COLLECTIVE_MATMUL_RULES,
    MATMUL_REDUCE_SCATTER,
    ring_name,
)
from meshfold.passes.rules.ops.random import with_own_draw
from meshfold.passes.rules.table import region_rules
from meshfold.passes.rules.typed import typed_rules
from meshfold.passes.split.chunk_graph import ChunkingError

Written = tuple[OpGraph, RegionTyping]

_RESHAPES = frozenset(("view", "_unsafe_view", "reshape"))


@dataclass(frozen=True)
class _Product:
    """ops: numbers, from what reads x to what makes out. bias: -1 for none; transposed: whether the
    weight is [k, o]."""

    ops: tuple[int, ...]
    x: int
    weight: int
    bias: int
    out: int
    transposed: bool

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.x, self.weight, *([self.bias] if self.bias >= 0 else []))


@dataclass(frozen=True)
class MatmulGroup:
    """Products that become one op. ops: their numbers in the region's graph, `at` the one that
    `op` stands for, typed as `typing`; axis: on which rows are gathered or scattered; value: what
    is, from one layout to the other."""

    ops: tuple[int, ...]
    at: int
    op: Op
    typing: OpTyping
    axis: int
    value: int
    edge: tuple[Layout, Layout]


def matmul_groups(graph: OpGraph, typing: RegionTyping, mesh: Mesh) -> tuple[MatmulGroup, ...]:
    """All groups of a region, in a fixed order."""
    return tuple(_Finder(graph, typing, mesh.sizes).groups())


def with_collective_matmuls(
    graph: OpGraph, typing: RegionTyping, mesh: Mesh, groups: Sequence[MatmulGroup]
) -> Written:
    """A region with some of its groups as collective matmuls: graph and typing; slots and outputs
    are the region's.

    Raises ChunkingError where another axis shards one as no rule does.
    """
    written_at = {group.at: group for group in groups}
    gone = {k for group in groups for k in group.ops} - written_at.keys()
    ops, typings, origins = [], [], []
    for k, (op, chosen) in enumerate(zip(graph.ops, typing.ops, strict=True)):
        if k in written_at:
            op, chosen = written_at[k].op, written_at[k].typing
        if k not in gone:
            ops.append(op if k in written_at else with_own_draw(op, k))
            typings.append(chosen)
            origins.append(written_at[k].ops if k in written_at else (k,))
    new, number = without_unmade(replace(graph, ops=tuple(ops)))
    # What is scattered inside an op is its result.
    also = {g.ops for g in groups if (g.value, g.edge[1]) in typing.kept.conversions}
    kept = KeptResults(
        tuple(
            n
            for n, of in enumerate(origins)
            if of in also or not set(typing.kept.ops).isdisjoint(of)
        ),
        tuple((number[v], x) for v, x in typing.kept.conversions if v in number),
    )
    written = new, replace(typing, ops=tuple(_named(new, typings, mesh.sizes)), kept=kept)
    try:
        typed_rules(*written, "", mesh)
    except PlanMismatchError as error:
        raise ChunkingError(str(error).removeprefix("region , ")) from error
    return written


def with_planned_matmuls(
    graph: OpGraph, typing: RegionTyping, region: RegionPlan, mesh: Mesh
) -> Written:
    """The same for a region of a plan. Raises PlanMismatchError."""
    groups = matmul_groups(graph, typing, mesh)
    try:
        return with_collective_matmuls(
            graph, typing, mesh, [groups[k] for k in region.collective_matmul]
        )
    except (IndexError, ChunkingError) as error:
        why = (
            str(error)
            if isinstance(error, ChunkingError)
            else f"it has {len(groups)} such products"
        )
        raise PlanMismatchError(
            f"region {region.name} is planned with collective matmuls "
            f"{list(region.collective_matmul)}, but {why}; plan again"
        ) from error


def _named(
    graph: OpGraph, typings: Sequence[OpTyping], sizes: tuple[int, ...]
) -> Iterator[OpTyping]:
    """Typings with the names of their rules, where an op took the place of others."""
    table = region_rules(graph, sizes)
    for k, (op, typing) in enumerate(zip(graph.ops, typings, strict=True)):
        if op.target not in COLLECTIVE_MATMUL_RULES:
            yield typing
            continue
        names = []
        for axis, before in enumerate(typing.rules):
            types = (
                tuple(layout[axis] for layout in typing.inputs),
                tuple(layout[axis] for layout in typing.outputs),
            )
            found = [r.name for r in table[k][axis] if (r.inputs, r.outputs) == types]
            names.append(found[0] if found else before)
        yield replace(typing, rules=tuple(names))


class _Finder:
    def __init__(self, graph: OpGraph, typing: RegionTyping, sizes: Sequence[int]) -> None:
        self.graph = graph
        self.typing = typing
        self.sizes = sizes
        layouts = layouts_of_values(graph, typing)
        self.native = [native for native, _ in layouts]
        self.demands = [demands for _, demands in layouts]
        self.products = list(self._products())
        self.found: list[MatmulGroup] = []
        self.rewritten: set[int] = set()

    def groups(self) -> list[MatmulGroup]:
        by_x: dict[int, list[_Product]] = {}
        for product in self.products:
            by_x.setdefault(product.x, []).append(product)
        for axis, size in enumerate(self.sizes):
            if size == 1:
                continue
            for x, products in by_x.items():
                self._gather(axis, x, products)
            for product in self.products:
                self._scatter(axis, product)
        return self.found

    # Products.

    def _products(self) -> Iterator[_Product]:
        for k, op in enumerate(self.graph.ops):
            names = dict(zip(("self", "mat1", "mat2"), op.args, strict=False))
            if op.target == "aten.linear.default":
                x, weight, *bias = op.operands
                if len(self.graph.values[weight].shape) == 2:
                    yield _Product((k,), x, weight, (bias or [-1])[0], op.outputs[0], False)
            elif op.target == "aten.addmm.default" and not op.kwargs and len(names) == len(op.args):
                yield from self._between_views(k, op)

    def _between_views(self, k: int, op: Op) -> Iterator[_Product]:
        """A product of rows that a view makes of x, and another takes apart again."""
        bias, rows, weight = op.operands
        values, users = self.graph.values, self.graph.users
        before, after = self.graph.producers[rows], users[op.outputs[0]]
        if before < 0 or users[rows] != (k,) or len(after) != 1 or len(values[bias].shape) != 1:
            return
        first, last = self.graph.ops[before], self.graph.ops[after[0]]
        if op_name(first.target) not in _RESHAPES or op_name(last.target) not in _RESHAPES:
            return
        (x,), (out,) = first.operands, last.outputs
        inner = {rows, op.outputs[0]}
        same_rows = values[x].shape[:-1] == values[out].shape[:-1]
        keeps_width = values[x].shape[-1:] == values[rows].shape[-1:]
        stays = all(
            len(self.demands[v]) == 1 and self.demands[v][0] == self.native[v] for v in inner
        )
        if same_rows and keeps_width and stays and inner.isdisjoint(self.graph.outputs):
            yield _Product((before, k, after[0]), x, weight, bias, out, True)

    def _layouts(self, product: _Product) -> tuple[Layout, Layout, Layout | None, Layout]:
        """The layouts of x as it is read, the weight, the bias and the result."""
        ops = self.typing.ops
        first, last = ops[product.ops[0]], ops[product.ops[-1]]
        if product.transposed:
            bias, _, weight = ops[product.ops[1]].inputs
            return first.inputs[0], weight, bias, last.outputs[0]
        _, weight, *of_bias = first.inputs
        return first.inputs[0], weight, of_bias[0] if of_bias else None, last.outputs[0]

    # Gathers.

    def _gather(self, axis: int, x: int, products: Sequence[_Product]) -> None:
        """Products that read all rows of x, which is sharded, on an axis."""
        t = self.native[x][axis]
        if not self._shards_rows(t, x):
            return
        gathered = _with(self.native[x], axis, REPLICATE)
        reading = [p for p in products if self._layouts(p)[0] == gathered]
        readers = {p.ops[0] for p in reading}
        if not reading or self._is_read_otherwise(x, axis, readers):
            return
        fits = (self._is_free(p) and self._has_columns(axis, p) for p in reading)
        if not all(fits) or len({p.transposed for p in reading}) > 1:
            return
        at = min(p.ops[0] for p in reading)
        parameters = [v for p in reading for v in p.operands[1:]]
        if any(self.graph.producers[v] >= at for v in parameters):
            return
        self._write_gather(axis, x, reading, at)

    def _is_read_otherwise(self, x: int, axis: int, readers: set[int]) -> bool:
        """Whether anything but these ops has x gathered on the axis."""
        layouts = [
            layout
            for k in self.graph.users[x]
            if k not in readers
            for v, layout in zip(self.graph.ops[k].operands, self.typing.ops[k].inputs, strict=True)
            if v == x
        ]
        pairs = zip(self.graph.outputs, self.typing.outputs, strict=True)
        layouts += [layout for v, layout in pairs if v == x]
        return any(layout[axis] != self.native[x][axis] for layout in layouts)

    def _has_columns(self, axis: int, product: _Product) -> bool:
        """Whether its weight is sharded by outputs, and so what it makes."""
        _, weight, bias, out = self._layouts(product)
        columns = len(self.graph.values[product.out].shape) - 1
        blocks = weight[axis].blocks
        return (
            _is_shard(weight[axis], 1 if product.transposed else 0)
            and _is_shard(out[axis], columns)
            and out[axis].blocks == blocks
            and (bias is None or (_is_shard(bias[axis], 0) and bias[axis].blocks == blocks))
        )

    def _write_gather(self, axis: int, x: int, products: Sequence[_Product], at: int) -> None:
        t = self.native[x][axis]
        layouts = [self._layouts(p) for p in products]
        all_blocks = (t.blocks, *(weight[axis].blocks for _, weight, _, _ in layouts))
        biases = tuple(Ref(p.bias) if p.bias >= 0 else None for p in products)
        args: tuple[Arg, ...] = (Ref(x), tuple(Ref(p.weight) for p in products), biases)
        given = [bias for _, _, bias, _ in layouts if bias is not None]
        typing = OpTyping(
            self._rules(axis, products, all_blocks),
            (self.native[x], *(weight for _, weight, _, _ in layouts), *given),
            tuple(out for *_, out in layouts),
        )
        edge = self.native[x], layouts[0][0]
        self._add(at, ALL_GATHER_MATMUL, args, axis, x, edge, all_blocks, products, typing)

    # Scatters.

    def _scatter(self, axis: int, product: _Product) -> None:
        """A product whose sums are scattered by rows on an axis."""
        out = product.out
        native, demands = self.native[out], self.demands[out]
        if native[axis] != PARTIAL or len(demands) != 1 or not self._is_free(product):
            return
        (shards,) = demands
        t = shards[axis]
        if not self._shards_rows(t, out) or shards != _with(native, axis, t):
            return
        x, weight, bias, _ = self._layouts(product)
        columns = len(self.graph.values[product.x].shape) - 1
        blocks = weight[axis].blocks
        is_split = _is_shard(weight[axis], 0 if product.transposed else 1)
        if not is_split or not _is_shard(x[axis], columns) or x[axis].blocks != blocks:
            return
        if bias is not None and bias[axis] != PARTIAL:
            return
        given = (x, weight, *([bias] if bias is not None else []))
        all_blocks = (t.blocks, blocks)
        typing = OpTyping(self._rules(axis, [product], all_blocks), given, (shards,))
        args = (
            Ref(product.x),
            Ref(product.weight),
            Ref(product.bias) if product.bias >= 0 else None,
        )
        at, edge = product.ops[-1], (native, shards)
        self._add(at, MATMUL_REDUCE_SCATTER, args, axis, out, edge, all_blocks, [product], typing)

    # Both.

    def _shards_rows(self, t: SpmdType, v: int) -> bool:
        shape = self.graph.values[v].shape
        return t.kind == "S" and not t.unit and t.dim < len(shape) - 1

    def _is_free(self, product: _Product) -> bool:
        return self.rewritten.isdisjoint(product.ops)

    def _rules(
        self, axis: int, products: Sequence[_Product], all_blocks: Sequence[int]
    ) -> tuple[str, ...]:
        """Rules of what stands for products: on other axes that of the products, which shards rows
        or nothing there."""
        first = self.typing.ops[products[0].ops[0]].rules
        return tuple(ring_name(all_blocks) if k == axis else name for k, name in enumerate(first))

    def _add(
        self,
        at: int,
        target: str,
        args: tuple[Arg, ...],
        axis: int,
        value: int,
        edge: tuple[Layout, Layout],
        all_blocks: tuple[int, ...],
        products: Sequence[_Product],
        typing: OpTyping,
    ) -> None:
        """The group of products; of value's layouts one has the shards of the axis."""
        dim = next(t.dim for layout in edge if (t := layout[axis]).is_shard)
        args = (*args, dim, all_blocks, products[0].transposed, self.sizes[axis])
        old = self.graph.ops[products[0].ops[-1]]
        outputs = tuple(p.out for p in products)
        op = replace(old, target=target, args=args, kwargs=(), outputs=outputs)
        ops = tuple(k for p in products for k in p.ops)
        self.found.append(MatmulGroup(ops, at, op, typing, axis, value, edge))
        self.rewritten.update(ops)


def without_unmade(graph: OpGraph) -> tuple[OpGraph, dict[int, int]]:
    """`graph` without the values that no op makes any more, and the new numbers of the others."""
    left = sorted({*range(len(graph.slots)), *(v for op in graph.ops for v in op.outputs)})
    number = {v: k for k, v in enumerate(left)}

    new = OpGraph(
        graph.slots,
        tuple(graph.values[v] for v in left),
        tuple(op.renumbered(number) for op in graph.ops),
        tuple(number[v] for v in graph.outputs),
        tuple((slot, number[v]) for slot, v in graph.mutations),
    )
    return new, number


def _is_shard(t: SpmdType, dim: int) -> bool:
    return t.kind == "S" and not t.unit and t.dim == dim


def _with(layout: Layout, axis: int, t: SpmdType) -> Layout:
    return (*layout[:axis], t, *layout[axis + 1 :])
