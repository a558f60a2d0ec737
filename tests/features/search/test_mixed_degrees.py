"""Layers of one plan at different tp degrees: in some, tp shards the batch, and ZeRO over it."""

import itertools
from functools import cache

import pytest
from support.models.hugging_face import BATCH, tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step

from meshfold.capture.pipeline import Captured, capture
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.ir.options import CompileOptions, Mode
from meshfold.ir.plan import Plan, SearchStats
from meshfold.ir.strategy import Degrees, TpMode
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.candidates import StrategyCandidate, most_sharded
from meshfold.passes.one_pass.search import MeshPlanner
from meshfold.passes.one_pass.shortlist import Shortlisted, simulated
from meshfold.passes.one_pass.tree import strategies_on
from meshfold.passes.planner.assembly import PlanRequest, assemble_plan
from meshfold.passes.price.step import estimate_step
from meshfold.passes.region.typing import MeshSearch
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere

EXACT = 1e-12
PROBER = OpProber()
Mixture = tuple[tuple[TpMode, int], ...]
"""(mode of tp, ZeRO level) of every instance: table, two layers, head."""

NO_STATS = SearchStats(0, 1, 0)
WIDE_ENDS: Mixture = (("sequence", 0), ("data", 2), ("data", 2), ("sequence", 0))
ONE_LAYER: Mixture = (("sequence", 3), ("data", 3), ("sequence", 3), ("sequence", 3))
WIDE_LAYERS: Mixture = (("data", 0), ("tensor", 2), ("tensor", 2), ("data", 0))
MIXTURES = {"ends": WIDE_ENDS, "one layer": ONE_LAYER, "layers": WIDE_LAYERS}
FAMILIES = ("gpt2", "llama")


@cache
def captured_family(family: str) -> Captured:
    with float64_everywhere():
        return capture(*tiny_model(family))


def planner_on(family: str, dp: int, tp: int, mode: Mode) -> MeshPlanner:
    """Without recomputation and offload."""
    folded = captured_family(family).graph
    cluster, options = resolve_cluster("local-cpu", dp * tp), CompileOptions(mode=mode)
    search = MeshSearch(folded, cluster, build_mesh(cluster, dp, tp), BATCH)
    strategies = strategies_on(Degrees(dp=dp, tp=tp))
    plain = [s for s in strategies if s.recompute == s.offload == "none"]
    return MeshPlanner(folded, cluster, search, plain, options, PROBER)


def candidate(planner: MeshPlanner, region: int, mode: TpMode, zero: int) -> StrategyCandidate:
    """With most parameters sharded; where nothing can be, without ZeRO."""
    of = most_sharded(planner.candidates[region])
    found = {(s.tp_mode, s.zero): c for s, c in of.items()}
    return found.get((mode, zero)) or found[mode, 0]


@cache
def mixed_plan(family: str, dp: int, tp: int, mixture: str, mode: Mode) -> Plan:
    """The plan in which every instance does what the mixture says."""
    planner = planner_on(family, dp, tp, mode)
    folded = planner.folded
    pairs = zip(folded.instances, MIXTURES[mixture], strict=True)
    wanted = [candidate(planner, instance.region, *what) for instance, what in pairs]
    found = simulated(Shortlisted(planner.price(wanted), planner))
    cluster = resolve_cluster("local-cpu", dp * tp)
    request = PlanRequest(folded, cluster, planner.options, family, BATCH, PROBER)
    return assemble_plan(request, found, (), NO_STATS, ())


@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_process(
    family: str, mixture: str, degrees: tuple[int, int], mode: Mode
) -> None:
    plan = mixed_plan(family, *degrees, mixture, mode)
    captured = captured_family(family)
    assert {region.strategy.batch_on_tp for region in plan.regions} == {False, True}
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram)
    with float64_everywhere():
        errors = errors_of_a_step(*tiny_model(family), captured, program)
    for of_rank in errors:
        assert max(of_rank.values()) < EXACT, max(of_rank, key=lambda name: of_rank[name])


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "scheduled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_on_processes(pools: Pools, family: str, mode: Mode) -> None:
    plan = plan_to_json(mixed_plan(family, 2, 2, "ends", mode))
    arguments = family, captured_family(family), plan
    found = pools.run(4, "support.programs.emit:compare_step", *arguments)
    for loss_error, gradient_error, name, uneven in found:
        assert loss_error < EXACT and gradient_error < EXACT, name
        assert not uneven


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_shards_over_tp_where_that_shards_the_batch(family: str) -> None:
    plan = mixed_plan(family, 2, 2, "ends", "eager")
    (layer,) = (region for region in plan.regions if region.num_instances == 2)
    matrices = [p for p in layer.parameters if len(p.shape) == 2]
    assert matrices and all(t.is_shard for p in matrices for t in p.stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_mixture_is_found(family: str) -> None:
    """Of all that assign a candidate without ZeRO to every region."""
    planner = planner_on(family, 2, 2, "eager")
    alone = [s for s in planner.strategies if not s.zero]
    cluster = resolve_cluster("local-cpu", 4)
    of = planner.folded, cluster, planner.search, alone, planner.options, PROBER
    planner = MeshPlanner(*of)
    found = planner.plan().best
    assert found is not None
    tied = [r for r, facts in enumerate(planner._facts) if facts.tied]
    programs = [planner.programs[mode] for mode in planner.programs]
    best_s = min(
        estimate_step(
            planner.folded,
            [p.typings[r] for r, p in enumerate(choice)],
            [p.prices[r] for r, p in enumerate(choice)],
            planner.costs,
            planner.options.optimizer,
        ).step_s
        for choice in itertools.product(programs, repeat=len(planner.folded.regions))
        if len({id(choice[r]) for r in tied}) < 2
    )
    assert found.time.step_s == pytest.approx(best_s, rel=1e-9)
