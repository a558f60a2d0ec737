"""Emission: a folded graph and a plan's types -> the program of a rank.

For every distinct (region, layouts of the values that arrive) one graph is written:

    for each op, in order:
        each operand in the layout the op's rule reads       _RegionEmitter.value
            a parameter first comes out of its group        _RegionEmitter._open_group
            a conversion is a start node and a wait node     _RegionEmitter._convert
        the op on local shapes                               meshfold.codegen.emit.op
    each output and mutated buffer in the layout it leaves in

The search prices the same typing through the same tables (passes/rules/table.py,
passes/price/conversions.py), so what is priced is what is emitted. Ranks differ in coordinates
only, which the graph reads from its `mesh` placeholder: one emission serves all ranks.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from types import MappingProxyType

import torch
from torch import fx

from meshfold.codegen.emit.op import emit_op
from meshfold.codegen.emit.op_context import OpContext
from meshfold.codegen.program.emitted import (
    CONTEXT,
    INSTANCE,
    ORIGIN,
    PLACE,
    EmittedProgram,
    ProgramStep,
    RegionProgram,
    group_name,
)
from meshfold.codegen.program.text import TYPE
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import PlanMismatchError
from meshfold.ir.conversion_step import Step as ConversionStep
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind, SourceKind
from meshfold.ir.plan import Plan
from meshfold.ir.spmd import INVARIANT, Layout, layout_text, local_shape
from meshfold.ir.strategy import OpTyping, RegionTyping
from meshfold.ops.conversions import emit_step
from meshfold.passes.graph.typed import arriving_layouts
from meshfold.passes.price.conversion_trees import conversion_trees
from meshfold.passes.price.conversions import conversion_steps
from meshfold.passes.price.parameter_groups import (
    ParameterGroupKey,
    changed_axes,
    parameter_group_key,
)
from meshfold.passes.split.operator_slices import whole_layout
from meshfold.zero.graph_ops import replicate_group, start_ahead, wait_group
from meshfold.zero.parameter_group import GroupMember, ParameterGroup

Written = tuple[OpGraph, RegionTyping]
"""What a region is emitted as."""


def check_runs(plan: Plan) -> None:
    """Raises PlanMismatchError, naming the region, for activations that cannot go to the host: of
    recomputed regions, in pipelines, and in mode scheduled."""
    for region in plan.regions:
        if region.strategy.offload != "activations":
            continue
        recompute = region.typing.recompute
        why = "the plan has several microbatches or stages" if plan.schedule else ""
        why = why or (f"the plan is for mode {plan.mode}" if plan.mode != "eager" else "")
        if why := why or ("the region is recomputed" if recompute != "none" else ""):
            raise PlanMismatchError(
                f"region {region.name} is planned as {region.strategy.label}, which cannot run: "
                f"{why}; plan again"
            )


def emit_typed(
    folded: FoldedGraph,
    typings: Sequence[RegionTyping],
    costs: CostModel,
    numbers: Sequence[int] = (),
    boundary: Mapping[str, Layout] = MappingProxyType({}),
    written: Mapping[int, Written] = MappingProxyType({}),
) -> EmittedProgram:
    """The program for `typings`, one per region. costs decide the order of conversion steps.

    numbers, boundary: of a pipeline stage the numbers of its instances in the full program, and the
    layouts of the values that it receives, by name. Other actions may come between its forward and
    its backward, so it releases everything. written: regions with another graph and typing.
    """
    emitted: dict[tuple[int, tuple[Layout, ...]], int] = {}
    regions: list[RegionProgram] = []
    programs: list[int] = []
    arriving = arriving_layouts(folded, typings, boundary)
    for instance, layouts in zip(folded.instances, arriving, strict=True):
        number = instance.region
        if (number, layouts) not in emitted:
            variant = sum(r.region == number for r in regions)
            name = folded.regions[number].name + (f".{variant}" if variant else "")
            given = folded.regions[number].graph, typings[number]
            emitter = _RegionEmitter(*written.get(number, given), layouts, costs)
            emitted[number, layouts] = len(regions)
            regions.append(emitter.emit(name, number, len(instance.floats)))
        programs.append(emitted[number, layouts])
    materializes = [regions[p].materializes_parameters for p in programs]
    steps = schedule(materializes, releases_all=bool(numbers))
    return EmittedProgram(
        folded,
        costs.mesh,
        tuple(typings),
        tuple(regions),
        tuple(programs),
        steps,
        _stored(folded, typings, len(costs.mesh.axes)),
        tuple(numbers) or folded.numbers or tuple(range(len(programs))),
    )


def schedule(
    materializes: Sequence[bool], *, releases_all: bool = False
) -> tuple[ProgramStep, ...]:
    """G, F and X steps for instances that materialize parameters (gather or cast) or do not:
    every gather one such instance ahead. The last one is released only where its backward does not
    come next."""
    gathering = [k for k, is_gathering in enumerate(materializes) if is_gathering]
    following = dict(zip(gathering, gathering[1:], strict=False))
    steps = [ProgramStep("G", gathering[0])] if gathering else []
    for k in range(len(materializes)):
        steps.append(ProgramStep("F", k, following.get(k, -1)))
        if k in following or (releases_all and materializes[k]):
            steps.append(ProgramStep("X", k))
    return tuple(steps)


def _stored(
    folded: FoldedGraph, typings: Sequence[RegionTyping], num_axes: int
) -> dict[str, Layout]:
    """Stored layout per parameter; Invariant for one that nothing reads."""
    stored = {
        source.name: whole_layout(layout, source.slice) if source.slice else layout
        for instance in folded.instances
        for source, layout in zip(instance.sources, typings[instance.region].slots, strict=True)
        if source.kind is SourceKind.PARAMETER
    }
    unsharded = (INVARIANT,) * num_axes
    return {p.name: stored.get(p.name, unsharded) for p in folded.parameters}


class _RegionEmitter:
    """Writes the graph of one region whose values arrive in the layouts `arriving`."""

    def __init__(
        self,
        ops: OpGraph,
        typing: RegionTyping,
        arriving: tuple[Layout, ...],
        costs: CostModel,
    ) -> None:
        self.ops = ops
        self.typing = typing
        self.arriving = arriving
        self.mesh = costs.mesh
        self.graph = fx.Graph()
        self.nodes: dict[tuple[int, Layout], fx.Node] = {}
        self.costs = costs
        self.storage = costs.storage
        self.parents, used = conversion_trees(ops, typing, arriving, costs)
        self.uses: dict[tuple[int, Layout], GroupMember] = {}
        self.direct = {v for v, s in enumerate(self.ops.slots) if s.kind is not SlotKind.PARAMETER}
        for v, layout in used:
            self._use_parameter(v, layout)
        self.groups = _group(list(self.uses.values()), self.ops, self.storage)
        self.is_ahead_started = False

    def emit(self, name: str, number: int, num_floats: int) -> RegionProgram:
        """The finished program of region number `number`."""
        direct = self._placeholders(num_floats)
        for k, typing in enumerate(self.typing.ops):
            self._op(k, typing)
        outputs = [
            self.value(v, layout)
            for v, layout in zip(self.ops.outputs, self.typing.outputs, strict=True)
        ]
        mutated = [self.value(v, self.arriving[slot]) for slot, v in self.ops.mutations]
        self.graph.output((*outputs, *mutated))
        graph = fx.GraphModule(torch.nn.Module(), self.graph, class_name=f"Region{name}")
        return RegionProgram(
            name,
            number,
            self.ops,
            self.typing,
            self.arriving,
            self.typing.outputs,
            self.groups,
            direct,
            graph,
            self.typing.recompute,
            self.typing.reshard_after_forward,
            self.typing.accumulate_unsharded,
        )

    def _use_parameter(self, v: int, used: Layout) -> None:
        """Put a parameter that ops read in the layout `used` in a group, or pass it directly."""
        value, stored = self.ops.values[v], self.arriving[v]
        here, read = self.mesh.on_storage(stored), self.mesh.on_storage(used)
        if parameter_group_key(v, value, here, read, self.storage) is not None:
            _, reduce = changed_axes(here, read)
            name = self.ops.slots[v].name
            self.uses[v, used] = GroupMember(v, name, value.shape, here, read, reduce)
            return
        self.direct.add(v)
        if used != stored:
            self.parents[v, used] = stored

    # Nodes, in the order in which they run.

    def _placeholders(self, num_floats: int) -> tuple[int, ...]:
        """Write the placeholders, see RegionProgram; returns the slots passed directly."""
        self.step_node = self.graph.placeholder(CONTEXT)
        self.ahead = self.graph.placeholder("ahead")
        self.instance = self.graph.placeholder(INSTANCE)
        self.in_flight = [self.graph.placeholder(group_name(k)) for k in range(len(self.groups))]
        direct = tuple(sorted(self.direct))
        for v in direct:
            self._bind(v, self.arriving[v], self._placeholder(self._label(v)))
        self.holes = [self._placeholder(f"float_{k}") for k in range(num_floats)]
        return direct

    def _placeholder(self, label: str) -> fx.Node:
        """A placeholder of a name of its own: fx makes the names of nodes unique, and takes a
        placeholder's argument as it is given."""
        node = self.graph.placeholder(label)
        node.target = node.name
        return node

    def _label(self, v: int) -> str:
        """A slot's name as a Python name, of ASCII: what Python reads as one name, fx does not."""
        label = re.sub(r"\W", "_", self.ops.slots[v].name, flags=re.ASCII)
        is_free = label.isidentifier() and not iskeyword(label) and label != "self"
        return label if is_free else f"value_{label or v}"

    def _op(self, k: int, typing: OpTyping) -> None:
        op = self.ops.ops[k]
        operands = [
            self.value(v, layout) for v, layout in zip(op.operands, typing.inputs, strict=True)
        ]
        before = next(iter(reversed(self.graph.nodes)))
        context = OpContext(
            self.graph,
            self.step_node,
            self.ops,
            k,
            typing,
            operands,
            self.mesh,
            self.instance,
            self.holes,
        )
        nodes = emit_op(context)
        for v, layout, node in zip(op.outputs, typing.outputs, nodes, strict=True):
            self._bind(v, layout, node)
        self._note_origin(before, k)

    def _note_origin(self, before: fx.Node, origin: int | tuple[int, ConversionStep]) -> None:
        """What all nodes behind `before` are part of."""
        for node in reversed(self.graph.nodes):
            if node is before:
                return
            node.meta[ORIGIN] = origin

    def value(self, v: int, layout: Layout) -> fx.Node:
        """The node of value `v` in `layout`, converted where it is not there yet."""
        if (v, layout) not in self.nodes:
            if (v, layout) in self.uses:
                self._open_group(v, layout)
            else:
                self._convert(v, self.parents[v, layout], layout)
        return self.nodes[v, layout]

    def _convert(self, v: int, source: Layout, target: Layout) -> None:
        node = self.value(v, source)
        value = self.ops.values[v]
        for step in conversion_steps(value, source, target, self.costs):
            before = next(iter(reversed(self.graph.nodes)))
            node = emit_step(self.graph, self.step_node, node, step, self.mesh, value)
            self._note_origin(before, (v, step))
        self._bind(v, target, node)

    def _open_group(self, v: int, layout: Layout) -> None:
        """First use of a group: wait for it, then let the next gathers start."""
        number, group = next(
            (k, b) for k, b in enumerate(self.groups) if self.uses[v, layout] in b.members
        )
        function = wait_group if group.is_materialized else replicate_group
        opened = self.graph.call_function(function, (self.in_flight[number],))
        use_of = {member: use for use, member in self.uses.items()}
        for k, member in enumerate(group.members):
            node = self.graph.create_node(
                "call_function", operator.getitem, (opened, k), name=self._label(member.slot)
            )
            self._bind(*use_of[member], node)
        if group.is_materialized and not self.is_ahead_started:
            # Not before: then three regions would be in memory, one of them in flight.
            self.graph.call_function(start_ahead, (self.ahead,))
            self.is_ahead_started = True

    def _bind(self, v: int, layout: Layout, node: fx.Node) -> None:
        self.nodes[v, layout] = node
        value = self.ops.values[v]
        shape = ", ".join(map(str, local_shape(value.shape, layout, self.mesh.sizes)))
        types = layout_text(layout) + " " if layout else ""
        # A conversion may be free, and then its node the same.
        node.meta.setdefault(PLACE, (v, layout))
        node.meta.setdefault(TYPE, f"{types}{value.dtype}[{shape}]")


def _group(
    uses: Sequence[GroupMember], ops: OpGraph, costs: CostModel
) -> tuple[ParameterGroup, ...]:
    """Members that are gathered over the same axes, or only reduced over the same, together, but
    for large ones (meshfold.passes.price.parameter_groups)."""
    groups: dict[ParameterGroupKey, list[GroupMember]] = {}
    for use in uses:
        key = parameter_group_key(use.slot, ops.values[use.slot], use.stored, use.used, costs)
        assert key is not None, "members have something to gather, to reduce or to cast"
        groups.setdefault(key, []).append(use)
    return tuple(
        ParameterGroup(
            key.gather,
            key.dtype,
            key.requires_grad,
            tuple(members),
            key.master,
            key.unbucketed is not None,
            key.replicas,
        )
        for key, members in groups.items()
    )
