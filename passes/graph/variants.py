"""Instances of one region that do different things become instances of different regions.

    split_regions   the search's choices per instance  -> a folded graph with one region per choice
    planned_graph   a plan's runs                      -> the same, when the plan is read back

The graphs are shared, only names and numbers change: region "B" whose instances take two choices
becomes "B1" and "B2". Everything behind the search (prices, memory, emission) works on the split
graph and knows one typing per region.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from meshfold.errors import PlanMismatchError
from meshfold.ir.op_graph import FoldedGraph, Instance, OpGraph, Region, SourceKind
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import UPDATED_BY_HOST, UniformStrategy


def split_regions(folded: FoldedGraph, choices: Sequence[Hashable]) -> FoldedGraph:
    """`folded` with one region per (region, choice), in order of first instance. choices: one per
    instance. Regions whose instances agree keep their name."""
    pairs = [(i.region, choice) for i, choice in zip(folded.instances, choices, strict=True)]
    numbers = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
    of_region: dict[int, list[int]] = {}
    for (region, _), number in numbers.items():
        of_region.setdefault(region, []).append(number)
    regions: dict[int, Region] = {}
    for region, members in of_region.items():
        original = folded.regions[region]
        for k, number in enumerate(members):
            suffix = str(k + 1) if len(members) > 1 else ""
            regions[number] = Region(original.name + suffix, original.graph)
    return replace(
        folded,
        regions=tuple(regions[k] for k in range(len(regions))),
        instances=tuple(
            Instance(numbers[pair], instance.scope, instance.sources, instance.floats)
            for instance, pair in zip(folded.instances, pairs, strict=True)
        ),
    )


def most_used(split: FoldedGraph, strategies: Sequence[UniformStrategy]) -> UniformStrategy:
    """What most ops do. strategies: per region."""
    weights: Counter[UniformStrategy] = Counter()
    for instance in split.instances:
        num_ops = len(split.regions[instance.region].graph.ops)
        weights[strategies[instance.region]] += num_ops
    return max(weights, key=lambda s: (weights[s], s.label))


def planned_graph(folded: FoldedGraph, plan: Plan) -> FoldedGraph:
    """`folded` split as `plan` has it; region k of the result is plan.regions[k].

    Raises PlanMismatchError when the plan's runs do not cover the instances of `folded`, each once
    and in order, or give a region to layers of another form.
    """
    number = {region.name: k for k, region in enumerate(plan.regions)}
    choices = _choices(plan, number, len(folded.instances))
    graphs: dict[int, OpGraph] = {}
    for k, instance in zip(choices, folded.instances, strict=True):
        graph = graphs.setdefault(k, folded.regions[instance.region].graph)
        if graph is not folded.regions[instance.region].graph:
            raise _other_model(f"region {plan.regions[k].name} stands for different layers")
    regions = []
    for k, planned in enumerate(plan.regions):
        if k not in graphs:
            raise _other_model(f"no layer runs region {planned.name}")
        typing = planned.typing
        if (len(graphs[k].ops), len(graphs[k].slots)) != (len(typing.ops), len(typing.slots)):
            raise _other_model(f"region {planned.name} has another graph")
        regions.append(Region(planned.name, graphs[k]))
    return replace(
        folded,
        regions=tuple(regions),
        instances=tuple(
            replace(instance, region=k)
            for k, instance in zip(choices, folded.instances, strict=True)
        ),
    )


def offloaded_parameters(planned: FoldedGraph, plan: Plan) -> frozenset[str]:
    """Names of the trained parameters whose optimizer states the plan has in the host's memory:
    those that a region whose parameters the host updates is the first to read, and under a schedule
    those that such regions alone read: several devices may hold one, and update it alike. planned:
    of planned_graph."""
    readers: dict[str, list[int]] = {}
    for instance in planned.instances:
        for source in instance.sources:
            if source.kind is SourceKind.PARAMETER:
                readers.setdefault(source.name, []).append(instance.region)
    leaves = [region.strategy.offload in UPDATED_BY_HOST for region in plan.regions]
    trained = {p.name for p in planned.parameters if p.requires_grad}
    return frozenset(
        name
        for name, regions in readers.items()
        if name in trained and all(leaves[k] for k in regions[: None if plan.schedule else 1])
    )


def parameters_by_layer(planned: FoldedGraph, plan: Plan) -> frozenset[str]:
    """Names of those of them that the device has only while their region runs. What other layers
    read, too, is there all the time."""
    reads = [
        (source.name, instance.region)
        for instance in planned.instances
        for source in instance.sources
        if source.kind is SourceKind.PARAMETER
    ]
    counts = Counter(name for name, _ in reads)
    offloads = [region.strategy.offload for region in plan.regions]
    found = {name for name, k in reads if offloads[k] == "parameters" and counts[name] == 1}
    return offloaded_parameters(planned, plan).intersection(found)


def regions_saved_on_host(plan: Plan) -> frozenset[int]:
    """Numbers of the regions of planned_graph whose saved activations wait in the host's memory."""
    return frozenset(k for k, r in enumerate(plan.regions) if r.strategy.offload == "activations")


def _choices(plan: Plan, number: dict[str, int], num_instances: int) -> list[int]:
    """The plan's region of every instance, in order."""
    choices: list[int] = []
    for stage in plan.stages:
        for run in stage.runs:
            if run.first != len(choices):
                raise _other_model(f"its runs place layer {len(choices)} elsewhere or not at all")
            choices += [number[run.region]] * run.count
    if len(choices) != num_instances:
        raise _other_model(f"it places {len(choices)} of {num_instances} layers")
    return choices


def _other_model(why: str) -> PlanMismatchError:
    return PlanMismatchError(f"the plan is not for this model: {why}; plan this model again")
