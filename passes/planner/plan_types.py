"""The check of a plan's types: what comes from a file is held against the tables that emit it.

    arity        every op, slot and output has a layout of one type per axis; every axis has a rule;
                 what a region keeps is there
    rules        the rules of an op exist, and give the layouts that the plan says (rules/typed.py)
    stored       parameters are Invariant or Shard, buffers and constants Invariant between steps,
                 tied ones alike in every region
    conversions  every layout that is read can be made from the one that arrives, for a value of
                 another region from that in which its producer gives it

A plan that passes is emitted, and computes what the model computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshfold.errors import PlanMismatchError
from meshfold.ir.mesh import DATA_AXIS, PIPELINE_AXIS, Mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind, SourceKind, Value
from meshfold.ir.plan import Plan, RegionPlan
from meshfold.ir.spmd import INVARIANT, PARTIAL, Layout, layout_text
from meshfold.passes.graph.typed import arriving_layouts, layouts_of_values, value_name
from meshfold.passes.price.conversion_trees import reachable
from meshfold.passes.price.parameter_groups import used_layout
from meshfold.passes.rules.table import AxisRule
from meshfold.passes.rules.typed import check_layout, typed_rules

OpRules = Sequence[tuple[AxisRule, ...]]
"""Per op of a region one rule per axis."""


def check_plan_types(split: FoldedGraph, plan: Plan) -> tuple[OpRules, ...]:
    """Per region the rules that its types name. split: the graph that the plan's types are for,
    with its regions (passes/graph/variants.py).

    Raises PlanMismatchError naming region and op, slot or output where a type breaks the tables.
    """
    rules = []
    for region, planned in zip(split.regions, plan.regions, strict=True):
        _check_arity(region.graph, planned, plan.mesh)
        _check_legal(region.graph, planned, plan.mesh)
        rules.append(typed_rules(region.graph, planned.typing, planned.name, plan.mesh))
    _check_stored(split, plan)
    arriving = arriving_layouts(split, [region.typing for region in plan.regions])
    numbers = (instance.region for instance in split.instances)
    for k, slots in dict.fromkeys(zip(numbers, arriving, strict=True)):
        planned = plan.regions[k]
        arrived = replace(planned, typing=replace(planned.typing, slots=slots))
        _check_conversions(split.regions[k].graph, arrived, plan.mesh)
    _check_outputs(split, plan)
    return tuple(rules)


def _check_arity(graph: OpGraph, planned: RegionPlan, mesh: Mesh) -> None:
    """Counts of layouts, and of the axes of each."""
    typing, axes = planned.typing, len(mesh.axes)
    where = f"region {planned.name}"
    _check_count(where, "slots", typing.slots, len(graph.slots))
    _check_count(where, "ops", typing.ops, len(graph.ops))
    _check_count(where, "outputs", typing.outputs, len(graph.outputs))
    for k, (op, chosen) in enumerate(zip(graph.ops, typing.ops, strict=True)):
        at = f"{where}, op {k} {op.target}"
        _check_count(at, "rules", chosen.rules, axes)
        _check_count(at, "inputs", chosen.inputs, len(op.operands))
        _check_count(at, "outputs", chosen.outputs, len(op.outputs))
    for at, _, layout in _layouts(graph, planned):
        _check_count(at, "types", layout, axes)
    counts = {"op": len(graph.ops), "value": len(graph.values)}
    kept = [("op", k) for k in typing.kept.ops]
    for v, layout in typing.kept.conversions:
        _check_count(f"{where}, value {v} that it keeps", "types", layout, axes)
        kept.append(("value", v))
    for what, number in kept:
        if number >= counts[what]:
            raise PlanMismatchError(
                f"{where}: keeps {what} {number}, it has {counts[what]} {what}s; plan again"
            )


def _check_count(where: str, what: str, found: Sequence[object], count: int) -> None:
    if len(found) != count:
        raise PlanMismatchError(f"{where}: {len(found)} {what}, it has {count}; plan again")


def _layouts(graph: OpGraph, planned: RegionPlan) -> Iterator[tuple[str, Value, Layout]]:
    """Where it is, of which value, and the layout: of all slots, ops and outputs."""
    typing, where = planned.typing, f"region {planned.name}"
    for v, layout in enumerate(typing.slots):
        yield f"{where}, {value_name(graph, v)}", graph.values[v], layout
    for k, (op, chosen) in enumerate(zip(graph.ops, typing.ops, strict=True)):
        at = f"{where}, op {k} {op.target}"
        values = zip((*op.operands, *op.outputs), (*chosen.inputs, *chosen.outputs), strict=True)
        yield from ((f"{at}, {value_name(graph, v)}", graph.values[v], x) for v, x in values)
    for k, (v, layout) in enumerate(zip(graph.outputs, typing.outputs, strict=True)):
        yield f"{where}, output {k} {value_name(graph, v)}", graph.values[v], layout


def _check_copies(graph: OpGraph, planned: RegionPlan, mesh: Mesh) -> None:
    """Parameters alone are stored in copies, one for each replica of the mesh."""
    for number, (at, _, layout) in enumerate(_layouts(graph, planned)):
        is_parameter = number < len(graph.slots) and (
            graph.slots[number].kind is SlotKind.PARAMETER
        )
        for axis, t in zip(mesh.axes, layout, strict=True):
            if t.copies == 1:
                continue
            if not is_parameter:
                raise PlanMismatchError(f"{at}: {t} is in copies; only parameters are stored so")
            if t.copies != axis.replicas:
                raise PlanMismatchError(
                    f"{at}: {t} on axis {axis.name}, of which the mesh has {axis.replicas} replicas"
                )


def _check_legal(graph: OpGraph, planned: RegionPlan, mesh: Mesh) -> None:
    """Layouts that shapes allow, and that can be between regions."""
    _check_copies(graph, planned, mesh)
    for at, _, layout in _layouts(graph, planned):
        for axis, t in zip(mesh.axes, layout, strict=True):
            if axis.name == PIPELINE_AXIS and t != INVARIANT:
                raise PlanMismatchError(f"{at}: {t} on axis pp, over which stages alone differ")
    between = [*enumerate(planned.typing.slots)]
    between += zip(graph.outputs, planned.typing.outputs, strict=True)
    for v, layout in between:
        at = f"region {planned.name}, {value_name(graph, v)}"
        check_layout(at, graph.values[v].shape, layout, mesh)
        where = f"{at}: {layout_text(layout)}"
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        if any(t.padded for t in layout) and not is_parameter:
            raise PlanMismatchError(f"{where} pads a dim; only parameters are stored so")
        if any(t.kind == "E" for t in layout):
            raise PlanMismatchError(f"{where} has rows at their experts, outside of a region")


def _check_conversions(graph: OpGraph, planned: RegionPlan, mesh: Mesh) -> None:
    """Every layout that ops and outputs read is there or can be made."""
    for v, (native, demands) in enumerate(layouts_of_values(graph, planned.typing)):
        is_parameter = v < len(graph.slots) and graph.slots[v].kind is SlotKind.PARAMETER
        # Parameters are gathered by the runtime; the rest is converted in the graph.
        roots = [used_layout(native, d, mesh) if is_parameter else native for d in demands]
        for demand, arrived in zip(demands, roots, strict=True):
            alike = (d for d, root in zip(demands, roots, strict=True) if root == arrived)
            is_made = demand in reachable(arrived, alike)
            for there, wanted in zip(arrived, demand, strict=True):
                if there == wanted:
                    continue
                if "E" in (there.kind, wanted.kind) or there.copies != 1 or not is_made:
                    raise PlanMismatchError(
                        f"region {planned.name}, {value_name(graph, v)}: no conversion leads from "
                        f"{layout_text(native)}, in which it is there, to {layout_text(demand)}, "
                        "in which it is read"
                    )
                if "P" in (there.kind, wanted.kind) and graph.values[v].dtype == "bool":
                    raise PlanMismatchError(
                        f"region {planned.name}, {value_name(graph, v)}: {layout_text(native)} to "
                        f"{layout_text(demand)}; flags are no pending sums, only numbers are"
                    )


def _check_stored(split: FoldedGraph, plan: Plan) -> None:
    """Parameters, buffers, constants and inputs are stored, or read, as the runtime can."""
    stored: dict[str, Layout] = {}
    for instance in split.instances:
        planned = plan.regions[instance.region]
        graph = split.regions[instance.region].graph
        for v, (source, layout) in enumerate(
            zip(instance.sources, planned.typing.slots, strict=True)
        ):
            where = f"region {planned.name}, {value_name(graph, v)}"
            kinds = {t.kind for t in layout}
            if source.kind is SourceKind.PARAMETER:
                if stored.setdefault(source.name, layout) != layout:
                    raise PlanMismatchError(
                        f"the plan stores {source.name} as {layout_text(stored[source.name])} and "
                        f"as {layout_text(layout)}; a tied parameter has one stored layout"
                    )
                if not kinds <= {"I", "S"}:
                    raise PlanMismatchError(
                        f"{where}: stored as {layout_text(layout)}; a parameter is stored "
                        "Invariant (I) or Shard (S)"
                    )
            elif source.kind is SourceKind.INPUT and not kinds <= {"I", "S"}:
                raise PlanMismatchError(
                    f"{where}: an input as {layout_text(layout)}; ranks read it Invariant (I) or "
                    "Shard (S)"
                )
            elif source.kind in (SourceKind.BUFFER, SourceKind.CONSTANT) and kinds - {"I"}:
                raise PlanMismatchError(
                    f"{where}: a {source.kind} as {layout_text(layout)}; it is stored Invariant (I)"
                )


def _check_outputs(split: FoldedGraph, plan: Plan) -> None:
    """What the model returns is the same on all ranks; what the user asked for may be shards, and
    the loss of a microbatch a pending sum over dp (passes/split/loss_sums.py)."""
    shards = split.apart if split.returns.sharded else ()
    for output in split.outputs:
        if output.source.kind is not SourceKind.VALUE:
            continue
        planned = plan.regions[split.instances[output.source.instance].region]
        layout = planned.typing.outputs[output.source.output]
        is_loss = bool(plan.schedule) and split.returns.has_loss and output == split.outputs[0]
        pending = {DATA_AXIS} if is_loss else set()
        types = zip(plan.mesh.names, layout, strict=True)
        left = [t for name, t in types if not (t == PARTIAL and name in pending)]
        if any(t != INVARIANT and not (t.is_shard and output in shards) for t in left):
            raise PlanMismatchError(
                f"the plan leaves the model's output {output.name!r} as {layout_text(layout)}; it "
                "must leave Invariant on all axes"
            )
