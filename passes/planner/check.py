"""Price a plan anew, as after somebody edited it: types against the rule table, time, memory.

What the search prices is a typing it made; what comes from a file is held against the same table
first. An op's rule names must exist on each axis and say the layouts that the file says.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import PlanMismatchError
from meshfold.gc_pause import collector_paused
from meshfold.ir.mesh import Mesh
from meshfold.ir.op_graph import FoldedGraph, OpGraph, SlotKind
from meshfold.ir.plan import ParameterPlacement, Plan, RegionPlan, SearchStats
from meshfold.ir.strategy import UPDATED_BY_HOST, Offload, RegionTyping
from meshfold.passes.events.bucketing import bucketed_events, sizes_of, with_events
from meshfold.passes.events.program import program_events
from meshfold.passes.graph.reads import ProgramReads, program_reads
from meshfold.passes.graph.typed import layouts_of_values
from meshfold.passes.graph.variants import planned_graph
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.memory.region import MemoryModel
from meshfold.passes.memory.zero import copied_bytes, host_traffic, slot_facts, updated_bytes
from meshfold.passes.planner.plan_types import check_plan_types
from meshfold.passes.price.parameters import stored_bytes
from meshfold.passes.price.region import RegionPrice, RegionPricer
from meshfold.passes.price.step import estimate_step, host_waits_s
from meshfold.passes.split.as_planned import as_planned


def price_plan(folded: FoldedGraph, plan: Plan, probe: Probe) -> Plan:
    """`plan` with step time, peak memory and costs of regions computed again for `folded`, the
    model it is for. What a search proved about it is dropped.

    Raises PlanMismatchError naming region and op (or slot) where a type breaks the rules.
    """
    if plan.schedule:
        raise PlanMismatchError(
            f"{plan.strategy.label}: a plan with stages or microbatches cannot be priced from "
            "its file; pin its degrees and plan again"
        )
    with collector_paused():
        return _priced(folded, plan, probe)


def _priced(folded: FoldedGraph, plan: Plan, probe: Probe) -> Plan:
    split = planned_graph(as_planned(folded, plan), plan)
    costs = CostModel(plan.cluster, plan.mesh)
    typings = [region.typing for region in plan.regions]
    offloads = [region.strategy.offload for region in plan.regions]
    pricers = _pricers(split, plan, costs)
    model, reads = MemoryModel(costs, probe), program_reads(split)
    prices = _prices(split, typings, pricers, model)
    prices = _with_hosts(split, typings, prices, offloads, model, reads)
    time = estimate_step(split, typings, prices, costs, plan.optimizer, offloads, reads)
    events = program_events(
        split,
        typings,
        pricers,
        costs,
        probe,
        optimizer=plan.optimizer,
        optimizer_s=time.optimizer_s + host_waits_s(split, prices, costs.cluster.overlap_slowdown),
        offloads=offloads,
        memory_model=model,
        reads=reads,
    )
    events = bucketed_events(events, sizes_of(plan), costs)
    memory, saved_bytes = model.step(
        split,
        typings,
        optimizer=plan.optimizer,
        reserve_bytes=plan.cluster.reserve_bytes,
        capacity_bytes=plan.memory.capacity,
        offloads=offloads,
        reads=reads,
    )
    priced = zip(split.regions, plan.regions, prices, saved_bytes, strict=True)
    found = with_events(replace(plan, memory=memory), events)
    return replace(
        found,
        time=time,
        regions=tuple(
            _priced_region(region.graph, planned, price, saved, plan.mesh)
            for region, planned, price, saved in priced
        ),
        search=SearchStats(0, 1, int(not found.memory.fits)),
    )


def _pricers(split: FoldedGraph, plan: Plan, costs: CostModel) -> list[RegionPricer]:
    """The pricer of each region, under the rules that its types name."""
    return [
        RegionPricer(region.graph, planned.typing, rules, costs)
        for region, planned, rules in zip(
            split.regions, plan.regions, check_plan_types(split, plan), strict=True
        )
    ]


def _prices(
    split: FoldedGraph,
    typings: Sequence[RegionTyping],
    pricers: Sequence[RegionPricer],
    model: MemoryModel,
) -> list[RegionPrice]:
    """The price of each region, recomputation included."""
    return [
        pricer.price(
            t.slots,
            t.recompute,
            reshard_after_forward=t.reshard_after_forward,
            selective=model.recompute_price(pricer.graph, t, split.first_floats[r], pricer),
        )
        for r, (pricer, t) in enumerate(zip(pricers, typings, strict=True))
    ]


def _with_hosts(
    split: FoldedGraph,
    typings: Sequence[RegionTyping],
    prices: Sequence[RegionPrice],
    offloads: Sequence[Offload],
    model: MemoryModel,
    reads: ProgramReads,
) -> list[RegionPrice]:
    """The prices with what offloaded regions send to their host. Raises PlanMismatchError where the
    link to it is unknown."""
    costs, cluster = model.costs, model.costs.cluster
    for name, rate, what in (
        ("host_bytes_per_s", cluster.host_bytes_per_s, {*UPDATED_BY_HOST, "activations"}),
        ("host_memory_bytes_per_s", cluster.host_memory_bytes_per_s, UPDATED_BY_HOST),
        ("disk_bytes_per_s", cluster.disk_bytes_per_s, {"disk"}),
    ):
        if not rate and what.intersection(offloads):
            raise PlanMismatchError(
                "the plan offloads to the host, and nothing is known about the link between device "
                f"and host, its memory or its disk; give {name} of the devices in the plan's "
                "cluster"
            )
    if all(offload == "none" for offload in offloads):
        return list(prices)
    facts = slot_facts(split, reads)
    found = []
    for r, (price, offload) in enumerate(zip(prices, offloads, strict=True)):
        if offload != "none":
            graph = split.regions[r].graph
            memory = model.region(graph, typings[r], split.first_floats[r])
            layouts, of = typings[r].slots, facts[r]
            updated = updated_bytes(graph, layouts, of, costs.mesh)
            trained = [i for i in of.first if graph.values[i].requires_grad]
            copied, tied = (
                copied_bytes(graph, layouts, slots, of.tied, costs.mesh)
                for slots in (trained, of.tied.intersection(trained))
            )
            host = host_traffic(offload, memory, updated, copied, tied, costs)
            price = replace(price, host=host)
        found.append(price)
    return found


def _priced_region(
    graph: OpGraph, planned: RegionPlan, price: RegionPrice, saved_bytes: int, mesh: Mesh
) -> RegionPlan:
    return replace(
        planned,
        parameters=placements(graph, planned.typing, mesh),
        conversions=price.conversions,
        forward_s=price.forward_s,
        backward_s=price.backward_s,
        communication_s=price.total_communication_s,
        saved_bytes=saved_bytes,
        alternatives=(),
    )


def placements(graph: OpGraph, typing: RegionTyping, mesh: Mesh) -> tuple[ParameterPlacement, ...]:
    """Where every parameter of a region is stored and how it is used."""
    out = []
    for i, (stored, demands) in enumerate(layouts_of_values(graph, typing)[: len(graph.slots)]):
        if graph.slots[i].kind is not SlotKind.PARAMETER:
            continue
        value = graph.values[i]
        out.append(
            ParameterPlacement(
                name=graph.slots[i].name,
                shape=value.shape,
                dtype=value.stored_dtype,
                stored=stored,
                used=demands[0] if demands else stored,
                num_bytes=stored_bytes(value, stored, mesh.sizes),
            )
        )
    return tuple(out)
