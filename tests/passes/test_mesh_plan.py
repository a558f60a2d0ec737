"""Leaves on one mesh: prices that add up, bounds that hold, mixes that are the best there are."""

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
from support_models import BATCH, families, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.strategy import Degrees
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.memory.region import Simulations, memory_of_region
from meshfold.passes.memory.zero import slot_facts
from meshfold.passes.one_pass.chain import LeafChain
from meshfold.passes.one_pass.planner import MeshPlanner
from meshfold.passes.one_pass.priced import order_of
from meshfold.passes.one_pass.tree import leaves_on
from meshfold.passes.price.region import price_region
from meshfold.passes.region.parameter_tables import stored_bytes
from meshfold.passes.region.typing import MODE_CHOICES, MeshSearch

PROBER = OpProber()


@cache
def graph_of(family: str, layers: int = 2) -> FoldedGraph:
    model, batch = tiny_model(family, layers=layers)
    return capture(model, batch).graph


@cache
def search_of(family: str, dp: int, tp: int, layers: int = 2) -> MeshSearch:
    cluster = resolve_cluster("dgx-v100", 4)
    return MeshSearch(graph_of(family, layers), cluster, build_mesh(cluster, dp, tp), BATCH)


def planner(
    family: str, dp: int, tp: int, memory_bytes: int | None = None, layers: int = 2
) -> MeshPlanner:
    cluster = resolve_cluster("dgx-v100", 4)
    options = CompileOptions(memory_bytes=memory_bytes)
    strategies = [leaf for leaf in leaves_on(Degrees(dp=dp, tp=tp)) if leaf.runs]
    search = search_of(family, dp, tp, layers)
    return MeshPlanner(graph_of(family, layers), cluster, search, strategies, options, PROBER)


@pytest.mark.parametrize("family", families("gpt2", without=("llama", "bert", "vit")))
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_a_step_is_the_sum_of_its_layers(family: str, dp: int, tp: int) -> None:
    of = planner(family, dp, tp)
    for strategy in of.uniform_by_time():
        leaves, priced = of._uniform_leaves(strategy), of.uniform(strategy)
        instances = of.folded.instances
        total = sum(leaves[i.region].time_s for i in instances)
        total += leaves[instances[0].region].ends_s + of.costs.launch_s
        assert priced.time.step_s == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("family", families("gpt2", without=("llama", "bert", "vit")))
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2)])
def test_leaves_have_the_figures_of_their_own_typing(family: str, dp: int, tp: int) -> None:
    of = planner(family, dp, tp)
    for region, leaves in enumerate(of.leaves):
        graph = of.folded.regions[region].graph
        for leaf in leaves:
            first = slot_facts(of.folded)[region].first
            stored = {
                i: stored_bytes(graph.values[i], leaf.typing.slots[i], of.mesh.sizes) for i in first
            }
            updated = sum(n for i, n in stored.items() if graph.values[i].requires_grad)
            assert (leaf.parameter_bytes, leaf.gradient_bytes) == (sum(stored.values()), updated)
            alone = memory_of_region(
                graph,
                leaf.typing,
                of.mesh,
                PROBER,
                costs=of.costs,
                floats=of._floats[region],
            )
            assert leaf.memory.saved_bytes == alone.saved_bytes
            solution = of.search.solution(region, **MODE_CHOICES[leaf.strategy.tp_mode])
            exact = price_region(graph, leaf.typing, solution.rules, of.mesh, of.costs)
            assert leaf.price == exact


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_latest_local_program_serves_other_recomputation_alone(family: str) -> None:
    of = planner(family, 2, 2)
    known = Simulations()
    for region, leaves in enumerate(of.leaves):
        graph, floats = of.folded.regions[region].graph, of._floats[region]
        typings = [leaf.typing for leaf in leaves[:4]]
        for typing in typings:
            for recompute in ("none", "full", "selective", "full"):
                asked = replace(typing, recompute=recompute)
                ask = partial(memory_of_region, graph, asked, of.mesh, PROBER)
                found = ask(costs=of.costs, floats=floats, known=known)
                assert found == ask(costs=of.costs, floats=floats)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_states_and_bound_of_memory_are_those_of_the_program(family: str) -> None:
    of = planner(family, 2, 2)
    for chain in of._chains():
        for strategy in {leaf.strategy for leaves in chain.leaves for leaf in leaves}:
            leaves = [
                max(
                    (x for x in region if x.strategy == strategy),
                    key=lambda x: len(x.sharded),
                    default=None,
                )
                for region in chain.everything
            ]
            if None in leaves:
                continue
            memory = of.price([leaves[i.region] for i in of.folded.instances]).memory
            instances = of.folded.instances
            states = sum(leaves[i.region].states_bytes for i in instances)
            held = sum(chain._always_held(leaves[i.region], i.region) for i in instances)
            assert (
                states + of.fixed_bytes - memory.reserve >= memory.optimizer + memory.parameters - 1
            )
            assert held + of.fixed_bytes <= memory.peak


def test_partly_sharded_leaves_lie_between() -> None:
    leaves = [x for x in planner("llama", 4, 1).leaves[1] if x.strategy.recompute == "none"]
    by_count = sorted(
        (x for x in leaves if x.strategy.zero in (0, 3)), key=lambda x: len(x.sharded)
    )
    assert [len(x.sharded) for x in by_count] == list(range(len(by_count)))
    states = [x.states_bytes for x in by_count]
    assert states == sorted(states, reverse=True) and len(set(states)) == len(states)
    assert len({x.name for x in leaves}) == len(leaves)


def test_tied_parameters_are_sharded_together() -> None:
    of = planner("gpt2", 4, 1)
    (first, *_, last) = of.leaves
    assert {leaf.ties for leaf in first} == {leaf.ties for leaf in last} == {False, True}
    for chain in of._chains():
        assert len({leaf.ties for leaves in chain.leaves for leaf in leaves} - {None}) == 1


def test_leaves_of_one_name_are_priced_apart() -> None:
    """One of three parameters sharded: the tied one, or another."""
    of = planner("gpt2", 4, 1)
    assignments = []
    for tie in (False, True):
        chosen = [
            next(
                leaf
                for leaf in leaves
                if leaf.ties in (None, tie) and len(leaf.sharded) == 1 and leaf.strategy.zero == 3
            )
            for leaves in of.leaves
        ]
        assignments.append([chosen[i.region] for i in of.folded.instances])
    names = [[leaf.name for leaf in assignment] for assignment in assignments]
    assert names[0] == names[1]
    for assignment in assignments:
        priced = of.price(assignment)
        assert [priced.leaves[i.region] for i in priced.split.instances] == assignment


def every_program(of: MeshPlanner, chain: LeafChain):
    """Exact figures of every choice of undominated leaves, layer by layer."""
    instances = of.folded.instances
    choices = [[x for x in chain.leaves[i.region] if not x.is_partial] for i in instances]
    return [of.price(list(assignment)) for assignment in itertools.product(*choices)]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1)])
@pytest.mark.parametrize(
    "share", [0.3, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 0.6, 1.0))]
)
def test_the_plan_is_within_its_gap_of_every_program(dp: int, tp: int, share: float) -> None:
    """Brute force: every layer any leaf."""
    free = planner("vit", dp, tp, layers=2)
    programs = [p for chain in free._chains() for p in every_program(free, chain)]
    peaks = [p.memory.peak for p in programs]
    budget = round(min(peaks) + share * (max(peaks) - min(peaks)))
    best = min((p for p in programs if p.memory.peak <= budget), key=order_of)
    found = planner("vit", dp, tp, budget, layers=2).plan()
    assert found.lower_bound_s <= best.time.step_s * (1 + 1e-9)
    assert found.best is not None and found.best.memory.peak <= budget
    gap = max(0.0, found.best.time.step_s / found.lower_bound_s - 1)
    assert found.best.time.step_s <= best.time.step_s * (1 + gap)
    assert found.best.time.step_s <= best.time.step_s * 1.02
