"""What region searches may choose on one mesh, given what its tp axis is for.

dp axis   The batch is followed through the rules (passes/region/data_parallel.py): that decides
          rule and
          boundary layout of everything on this axis.
ep axis   What dp does goes on inside of dp's shards, for every op and every boundary value; between
          dispatch and combine rows are with their experts (passes/rules/expert_axis.py), whose
          weights are stored as shards. Experts with a capacity take rows of fixed shapes: where
          these leave the batch for them is left to the search (passes/rules/expert_capacity.py),
          and nothing else.
cp axis   Boundary values with a sequence are shards of it, inside of tp's shard where tp shards the
          sequence as well. Parameters are stored and used unsharded. Rules are left to the search.
tp axis   Boundary values are Invariant or, with sequence parallelism, shards of their sequence dim.
          Parameters are stored Invariant or as the shard their op reads, never gathered. The region
          search finds the rest, in the role TENSOR or SEQUENCE (passes/region/roles.py). In the
          role DATA the axis goes on with what dp does inside each of its shards, so that a region
          is data-parallel over both, with unsharded parameters: for regions that are cheap to
          replicate among others that are not (Whale, Jia et al., 2022).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind, Value
from meshfold.ir.spmd import INVARIANT, REPLICATE, Layout, Shard, SpmdType, is_legal
from meshfold.passes.graph.boundaries import Boundaries, find_boundaries, sequence_type
from meshfold.passes.price.op_time import OpWorks
from meshfold.passes.region.data_parallel import (
    DataParallel,
    Followed,
    batch_problem,
    follow_batch,
    stored_options,
)
from meshfold.passes.region.elimination import EliminationPlans
from meshfold.passes.region.pins import PinnedSlots, keeps_tp
from meshfold.passes.region.roles import AxisRole
from meshfold.passes.rules.book import RuleBook
from meshfold.passes.rules.context_axis import context_rules
from meshfold.passes.rules.expert_axis import expert_rules, without_sharded_rows
from meshfold.passes.rules.expert_capacity import RulesOfOp, capacity_rules
from meshfold.passes.rules.joint import RuleTable
from meshfold.passes.rules.table import AxisRule, rule_inside


@dataclass(frozen=True)
class SearchCache:
    """What the meshes of one program have in common. followed: what was found on the dp axis."""

    boundaries: Boundaries
    rules: RuleBook
    followed: Followed
    works: OpWorks
    plans: EliminationPlans

    @staticmethod
    def of(folded: FoldedGraph) -> "SearchCache":
        """Nothing found yet."""
        rules = RuleBook([region.graph for region in folded.regions])
        return SearchCache(find_boundaries(folded), rules, {}, OpWorks(), EliminationPlans())


KeptSlots = Mapping[tuple[int, int], Layout]
"""The stored layout of a parameter, by (region, slot)."""


class SearchSpace:
    """Rules and layouts of the regions of one folded program on one mesh. `role` below is what the
    tp axis is for; regions are numbers.

    cache: what other meshes of this program found, to use and to add to. pinned: parameters whose
    layout the user fixed; keeps_pins tells whether this mesh can store them so. kept: parameters
    that are stored already, each in the one layout that is left, without the shards of ZeRO.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        costs: CostModel,
        batch_size: int,
        cache: SearchCache,
        pinned: PinnedSlots,
        kept: KeptSlots = MappingProxyType({}),
    ) -> None:
        self.folded = folded
        self.mesh = costs.mesh
        self.costs = costs
        self.batch_size = batch_size
        self.cache = cache
        self.pinned = pinned
        self.kept = kept
        self.graphs: list[OpGraph] = [region.graph for region in folded.regions]
        self.boundaries: Boundaries = cache.boundaries
        axes = map(self._axis, ("dp", "ep", "cp", "tp"))
        self.dp_axis, self.ep_axis, self.cp_axis, self.tp_axis = axes
        self._own_rules: list[RuleTable] = [
            cache.rules.table(r, costs.mesh.sizes) for r in range(len(self.graphs))
        ]
        self.data: DataParallel | None = None
        if self.dp_axis is not None or self.ep_axis is not None:
            assert 0 in (self.dp_axis, self.ep_axis), "the batch is sharded by the outermost axes"
            self.data = self._followed(costs.mesh.sizes[0])
        self._expert_rules: list[tuple[RulesOfOp, ...]] = []
        """What every op of a region may do on the ep axis."""
        self._expert_weights: list[Mapping[int, SpmdType]] = [{}] * len(self.graphs)
        if self.ep_axis is not None:
            found = [self._rules_at_experts(r) for r in range(len(self.graphs))]
            self._expert_rules = [rules for rules, _ in found]
            self._expert_weights = [weights for _, weights in found]
        self.rules = [self._open_rules(r) for r in range(len(self.graphs))]
        self.stored = [
            {
                i: self._stored(r, i)
                for i, slot in enumerate(g.slots)
                if slot.kind is SlotKind.PARAMETER
            }
            for r, g in enumerate(self.graphs)
        ]

    def roles(self, role: AxisRole) -> tuple[AxisRole, ...]:
        """The role of every axis."""
        decided = {"dp": AxisRole.DATA, "ep": AxisRole.EXPERT, "cp": AxisRole.CONTEXT}
        of_axis = {**decided, "tp": role}
        return tuple(of_axis[name] for name in self.mesh.names)

    def rules_of(self, region: int, role: AxisRole) -> RuleTable:
        """What its ops may do."""
        return self._rules_of_data(region) if role is AxisRole.DATA else self.rules[region]

    def fixed_rules(self, region: int) -> Mapping[int, Sequence[Collection[str]]]:
        """Axis -> the rules of every op, on axes that are decided before the search."""
        fixed: dict[int, Sequence[Collection[str]]] = {}
        if self.data is not None and self.dp_axis is not None:
            fixed[self.dp_axis] = [(name,) for name in self.data.rules(region)]
        if self.ep_axis is not None:
            allowed = self._expert_rules[region]
            fixed[self.ep_axis] = [tuple(rule.name for rule in rules) for rules in allowed]
        return fixed

    def slot_layouts(self, region: int, role: AxisRole) -> list[list[Layout]]:
        """The layouts in which each slot may arrive, or in which a parameter may be stored."""
        layouts: list[list[Layout]] = []
        for i, slot in enumerate(self.graphs[region].slots):
            if slot.kind is not SlotKind.PARAMETER:
                layouts.append([self._boundary(self.boundaries.slots[region][i], role)])
            elif role is AxisRole.DATA:
                layouts.append([self.unsharded])
            else:
                layouts.append(self.stored[region][i])
        return layouts

    def output_layouts(self, region: int, role: AxisRole) -> list[list[Layout]]:
        """The layouts in which each output may leave."""
        return [
            self._free_layouts(c, role) if c in self.boundaries.free else [self._boundary(c, role)]
            for c in self.boundaries.outputs[region]
        ]

    def priced_apart(self, region: int) -> frozenset[int]:
        """The outputs of a region that the user asked for, by number: gathered whatever the role of
        an axis, and by a conversion of their own."""
        apart = self.boundaries.apart
        return frozenset(k for k, c in enumerate(self.boundaries.outputs[region]) if c in apart)

    def _free_layouts(self, boundary_class: int, role: AxisRole) -> list[Layout]:
        """An output that may leave as a shard: of the batch on dp, on tp of any dim."""
        plain, value = self._boundary(boundary_class, role), self.boundaries.values[boundary_class]
        if self.tp_axis is None or role is AxisRole.DATA:
            return [plain]
        shards = [Shard(d) for d in range(len(value.shape))]
        ways = [
            (*plain[: self.tp_axis], t, *plain[self.tp_axis + 1 :]) for t in (INVARIANT, *shards)
        ]
        return [x for x in ways if is_legal(value.shape, x, self.mesh.sizes)]

    def keeps_pins(self, role: AxisRole) -> bool:
        """Whether there is a pinned layout for every parameter that has one."""
        shards_weights = self.tp_axis is not None and role is not AxisRole.DATA
        if any(pin.tp_dim is not None for pin in self.pinned.values()) and not shards_weights:
            return False
        return all(options for of_region in self.stored for options in of_region.values())

    @property
    def unsharded(self) -> Layout:
        """Invariant on every axis."""
        return (INVARIANT,) * len(self.mesh.axes)

    def _axis(self, name: str) -> int | None:
        return self.mesh.index(name) if name in self.mesh.names else None

    def _layout(self, **types: SpmdType) -> Layout:
        """A type for each axis that is named and there; the others are Invariant."""
        return tuple(types.get(name, INVARIANT) for name in self.mesh.names)

    # Rules.

    def _open_rules(self, region: int) -> RuleTable:
        """The rules of a region, on cp those worth asking about (passes/rules/context_axis.py)."""
        table, graph = self._own_rules[region], self.graphs[region]
        if self.ep_axis is not None:
            return self._with_expert_rules(region)
        if self.cp_axis is None:
            return table
        crossing = [(v, c) for v, c in enumerate(self.boundaries.slots[region])]
        crossing += zip(graph.outputs, self.boundaries.outputs[region], strict=True)
        layouts = [
            (v, self._boundary(c, role)[self.cp_axis])
            for v, c in crossing
            for role in (AxisRole.TENSOR, AxisRole.SEQUENCE)
        ]
        return context_rules(
            graph,
            table,
            self.mesh.sizes,
            cp_axis=self.cp_axis,
            tp_axis=self.tp_axis,
            crossing=[(v, t) for v, t in layouts if t.is_shard],
        )

    def _rules_at_experts(
        self, region: int
    ) -> tuple[tuple[RulesOfOp, ...], Mapping[int, SpmdType]]:
        """(what every op may do on the ep axis, how expert weights are stored there)."""
        assert self.data is not None and self.ep_axis is not None
        graph, size = self.graphs[region], self.mesh.sizes[self.ep_axis]
        chosen = []
        for k, (name, rules) in enumerate(
            zip(self.data.rules(region), self._own_rules[region], strict=True)
        ):
            (rule,) = (r for r in rules[0] if r.name == name)
            if self.ep_axis:
                rule = rule_inside(graph, k, rule, self.mesh.sizes[0], size) or rules[0][0]
            chosen.append(rule)
        travelled, weights = expert_rules(graph, chosen, size)
        own = [per_axis[self.ep_axis] for per_axis in self._own_rules[region]]
        allowed, more = capacity_rules(graph, travelled, own)
        return allowed, {**dict.fromkeys(weights, Shard(0)), **more}

    def _with_expert_rules(self, region: int) -> RuleTable:
        """The own rules, on ep with those that every op may take."""
        axis = self.ep_axis
        assert axis is not None
        table = []
        pairs = zip(self._own_rules[region], self._expert_rules[region], strict=True)
        for per_axis, allowed in pairs:
            names = {rule.name for rule in allowed}
            others = (other for other in per_axis[axis] if other.name not in names)
            table.append((*per_axis[:axis], (*others, *allowed), *per_axis[axis + 1 :]))
        if self.tp_axis is None:
            return tuple(table)
        return without_sharded_rows(self.graphs[region], tuple(table), self.tp_axis)

    @cached_property
    def _batch_on_tp(self) -> DataParallel:
        """The batch followed on the tp axis of a mesh without dp."""
        assert self.data is None and self.tp_axis is not None
        return self._followed(self.mesh.sizes[self.tp_axis])

    def _followed(self, axis_size: int) -> DataParallel:
        alone = [tuple(per_axis[:1] for per_axis in table) for table in self._own_rules]
        boundaries, batch_size = self.boundaries, self.batch_size
        key = batch_problem(boundaries, axis_size, alone, batch_size)
        found = self.cache.followed.get(key)
        if found is None:
            works = self.cache.works
            found = self.cache.followed[key] = follow_batch(
                self.folded, boundaries, alone, self.costs, batch_size, works, pending=True
            )
        return found

    def _rules_of_data(self, region: int) -> RuleTable:
        """The rules of a region, on tp that of dp inside its shards, or the unsharded one."""
        data = self.data or self._batch_on_tp
        sizes = self.mesh.sizes
        table = []
        for k, (name, rules) in enumerate(zip(data.rules(region), self.rules[region], strict=True)):
            (chosen,) = (rule for rule in rules[0] if rule.name == name)
            inside: AxisRule | None = chosen
            if len(sizes) > 1:
                inside = rule_inside(self.graphs[region], k, chosen, sizes[0], sizes[-1])
            plain = rules[-1][0]
            on_tp = (plain, inside) if inside and inside.name != plain.name else (plain,)
            table.append((*rules[:-1], on_tp))
        return tuple(table)

    # Layouts.

    def _boundary(self, boundary_class: int | None, role: AxisRole) -> Layout:
        """The layout in which a class of values crosses between regions."""
        if boundary_class is None:
            return self.unsharded
        b = self.boundaries
        value = b.values[boundary_class]
        dp = INVARIANT if self.data is None else self.data.types[boundary_class]
        ep = dp
        if self.dp_axis is not None and dp.is_shard:
            ep = Shard(dp.dim, dp.blocks * self.mesh.sizes[0])
        if role is AxisRole.DATA:
            tp = INVARIANT
            if self.data is None:
                tp = self._batch_on_tp.types[boundary_class]
            elif dp.is_shard:
                tp = Shard(dp.dim, dp.blocks * self.mesh.sizes[0])
            elif dp == REPLICATE:
                tp = dp
            return self._first_legal(value, self._layout(dp=dp, tp=tp), self._layout(dp=dp))
        if self.ep_axis is not None and not is_legal(
            value.shape, self._layout(dp=dp, ep=ep), self.mesh.sizes
        ):
            ep = INVARIANT
        if boundary_class in (b.inputs | b.results) - b.free:
            return self._layout(dp=dp, ep=ep)
        return self._shard_sequence(value, dp, ep, role)

    def _shard_sequence(self, value: Value, dp: SpmdType, ep: SpmdType, role: AxisRole) -> Layout:
        """A carried activation: its sequence sharded by the axes that do so, cp inside of tp."""
        cp = tp = INVARIANT
        inside = 1
        if self.tp_axis is not None:
            inside = self.mesh.sizes[self.tp_axis]
            if role is AxisRole.SEQUENCE:
                tp = sequence_type(value, dp, inside)
        if self.cp_axis is not None:
            cp = sequence_type(value, dp, self.mesh.sizes[self.cp_axis])
        nested = Shard(cp.dim, inside) if cp.is_shard else cp
        return self._first_legal(
            value,
            self._layout(dp=dp, ep=ep, cp=nested, tp=tp),
            self._layout(dp=dp, ep=ep, cp=nested),
            self._layout(dp=dp, ep=ep, cp=cp),
            self._layout(dp=dp, ep=ep),
        )

    def _first_legal(self, value: Value, *layouts: Layout) -> Layout:
        return next(x for x in layouts if is_legal(value.shape, x, self.mesh.sizes))

    def _stored(self, region: int, slot: int) -> list[Layout]:
        if (region, slot) in self.kept:
            return [self.kept[region, slot]]
        pin = self.pinned.get((region, slot))
        shared = self._expert_weights[region].get(slot, INVARIANT)
        ep = shared if pin is None else INVARIANT
        if self.tp_axis is None:
            return [self._layout(ep=ep)]
        graph, rules = self.graphs[region], self._own_rules[region]
        layouts = [
            self._layout(ep=ep, tp=t)
            for t in stored_options(graph, slot, rules, self.tp_axis)
            if pin is None or keeps_tp(pin, t)
        ]
        shape, sizes = graph.values[slot].shape, self.mesh.sizes
        return [layout for layout in layouts if is_legal(shape, layout, sizes)]
