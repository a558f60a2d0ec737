"""Lets pipelines compete with the best plan that runs every batch in one pass.

    plan without a pipeline, if one fits -> incumbent and lower bound of the search over pipelines
        (pipeline/search.py) -> whichever is faster, with the proof that covers both

A baseline is the best uniform 3D plan: every layer alike, layers divided evenly into stages,
tp x pp x dp and microbatches as fit best, 1f1b with the least warm-up.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshfold.cost_models.op_costs.optimizers import has_states
from meshfold.cost_models.pipeline.schedules import V_ORDERS
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.options import VIRTUAL_STAGES, CompileOptions, PinValue
from meshfold.ir.plan import MeshOutcome, Plan, PricedStrategy, SearchStats
from meshfold.ir.stage_pins import is_pipeline_pinned
from meshfold.passes.graph.boundaries import carried_sequences, carries_feature_maps
from meshfold.passes.memory.host_use import HostUse
from meshfold.passes.one_pass.shortlist import MOST_BEYOND
from meshfold.passes.one_pass.tree import RESTRICTIONS, SearchSpec
from meshfold.passes.pipeline.bounds import shards_weights
from meshfold.passes.pipeline.device_memory import device_memory
from meshfold.passes.pipeline.problem import PipelineProblems
from meshfold.passes.pipeline.search import (
    PipelineOutcome,
    PricedPipeline,
    beyond_sums,
    search_pipelines,
    with_counted_memory,
)
from meshfold.passes.pipeline.simulated import (
    TypedPipeline,
    by_step,
    rank_pipelines,
    simulated_step_s,
)
from meshfold.passes.pipeline.tree import CUT_EXPERTS, PipelineTree, grow_pipelines
from meshfold.passes.planner.accumulation import fitting_rows
from meshfold.passes.planner.assembly import PlanRequest, model_info
from meshfold.passes.planner.baselines import best_uniform_pipeline
from meshfold.passes.planner.host_note import check_host_memory, stored_notes
from meshfold.passes.planner.pipeline_assembly import assemble_pipeline
from meshfold.passes.rules.expert_axis import shared_experts
from meshfold.passes.split.pieces import sizes_of
from meshfold.units import bytes_text, seconds_text


def plan_with_pipelines(request: PlanRequest, in_one_pass: Sequence[Plan]) -> tuple[Plan, ...]:
    """The faster of the best pipeline and the first of `in_one_pass`, the best plan of that kind,
    then the others of that kind.

    Raises OptionError for pins that no pipeline keeps, InfeasibleError when no plan fits.
    """
    without = in_one_pass[0] if in_one_pass else None
    try:
        problems, tree = _grown(request)
    except OptionError as error:
        if without is None:
            raise
        note = f"no pipeline: {error}"
        return tuple(replace(plan, notes=(*plan.notes, note)) for plan in in_one_pass)
    known = request.beat_s, request.beat_s
    if without is not None:
        # A pipeline is held against the simulated step: what adds up to no more than that counts.
        known = max(without.step_s, without.time.step_s), without.search.lower_bound_s
    num_starts = request.num_starts
    outcome = search_pipelines(problems, tree, *known, num_starts)
    typed, best_s, outcome = _fastest(problems, outcome, known[0], num_starts)
    best = None if typed is None else typed.found
    if without and best_s > (1 - LEAST_GAIN) * without.step_s:
        best = None
    if best is None and without is None:
        raise _no_plan(request.options, problems, tree)
    uniform = _uniform_row(problems, tree)
    earlier = fitting_rows(request, without.baselines if without else (), problems)
    outcome = replace(outcome, best=None)
    others = tuple(
        replace(
            plan,
            search=_stats(tree, outcome, plan, best_s),
            baselines=(*earlier, *uniform),
        )
        for plan in in_one_pass
    )
    if typed is None or best is None:
        return others
    is_cut = problems.folded is not request.folded
    pipeline = assemble_pipeline(
        typed,
        model=model_info(request.folded, request.model_name, request.batch_size),
        pieces=sizes_of(problems.folded) if is_cut else (),
        baselines=(*earlier, *_one_pass_row(without), *uniform),
        stats=_stats(tree, replace(outcome, best=best), without, best_s),
        notes=(*_notes(request, problems, best), *_why(request.options, without, best, best_s)),
    )
    return pipeline, *others


def _fastest(
    problems: PipelineProblems, outcome: PipelineOutcome, known_s: float, num_starts: int
) -> tuple[TypedPipeline | None, float, PipelineOutcome]:
    """The fastest as simulated that fits, its seconds, and the outcome with what was searched for
    it. Where it takes longer than it adds up, MOST_BEYOND of the pipelines that add up to less than
    it takes, or than known_s, are planned and simulated, too."""
    typed, best_s = _fastest_that_fits(problems, outcome.found, known_s, num_starts)
    if typed is None:
        return None, best_s, outcome
    limit_s = (1 - LEAST_GAIN) * min(best_s, known_s)
    if typed.found.step_s < limit_s:
        known = len(outcome.found)
        outcome = beyond_sums(outcome, limit_s, MOST_BEYOND)
        others = outcome.found[known:]
        other, other_s = _fastest_that_fits(problems, others, limit_s, num_starts)
        if other_s < limit_s:
            typed, best_s = other, other_s
    return typed, best_s, outcome


def _fastest_that_fits(
    problems: PipelineProblems,
    found_by_sums: Sequence[PricedPipeline],
    beat_s: float,
    num_starts: int,
) -> tuple[TypedPipeline | None, float]:
    """The first by simulated time whose simulated peak fits, too, and its seconds. Where that peak
    is not what the search adds up, and the step below beat_s, the memory of the devices is changed
    by the difference, and their stages are searched again, MOST_AGAIN times in all."""
    ranked = rank_pipelines(problems, found_by_sums) if found_by_sums else []
    num_left = MOST_AGAIN
    best: TypedPipeline | None = None
    best_s = np.inf
    while ranked and by_step(ranked[0]) < best_s:
        found, step_s = ranked.pop(0)
        typed = TypedPipeline(problems, found)
        num_devices = found.plan.schedule.num_devices
        peaks = np.array([device_memory(typed, d).peak for d in range(num_devices)])
        if (peaks <= found.problem.capacity_bytes).all():
            best, best_s = typed, step_s
        if step_s >= beat_s or not num_left:
            continue
        if again := with_counted_memory(found, peaks, num_starts):
            num_left -= 1
            ranked.append((again, simulated_step_s(problems, again)))
            ranked.sort(key=by_step)
    return best, best_s


def _grown(request: PlanRequest) -> tuple[PipelineProblems, PipelineTree]:
    """Pipelines of a request. Raises OptionError for pins that none keeps."""
    options, pieces = request.options, request.folded
    if options.pins.get("ep", 1) == 1:
        pieces = request.shared.pieces(request.folded, _most_stages(request))
    problems = request.shared.problems(
        pieces, request.cluster, options, request.batch_size, request.probe
    )
    spec = search_spec(request, options.without_rules)
    spec = replace(spec, pins=_pins(request), whole_batch=problems.microbatches.refusal)
    tree = grow_pipelines(spec, len(pieces.instances))
    is_cut = pieces is not request.folded
    return problems, tree.without_shared_experts() if is_cut else tree


MOST_AGAIN = 4
"""Searches of stages for what a simulated peak is above the memory, or below it where the search
had none left. Chosen: each takes seconds, and of a pipeline one or two are enough."""

LEAST_GAIN = 5e-3
"""What a pipeline is faster by, as simulated, than a plan in one pass, which trains by a plain
loop, to be taken."""


def search_spec(request: PlanRequest, without: Sequence[str]) -> SearchSpec:
    """What the rules of the decision tree depend on. without: rules that are switched off."""
    folded, cluster, options = request.folded, request.cluster, request.options
    return SearchSpec(
        num_devices=cluster.num_devices,
        devices_per_node=min(group.devices_per_node for group in cluster.groups),
        batch_size=request.batch_size,
        pins=options.strategy_pins,
        allow_offload=options.allow_offload,
        switched_off=without,
        host_bytes_per_s=cluster.host_bytes_per_s,
        host_memory_bytes_per_s=cluster.host_memory_bytes_per_s,
        disk_bytes_per_s=cluster.disk_bytes_per_s,
        states_on_disk=request.states_on_disk,
        has_states=has_states(options.optimizer),
        has_feature_maps=carries_feature_maps(folded),
        sequences=carried_sequences(folded),
        experts=shared_experts(folded),
        mode=options.modes[0],
    )


def _pins(request: PlanRequest) -> dict[str, PinValue]:
    """The pins about strategies. Slices of a parameter are stored alike, and stages choose ZeRO
    layer by layer: with slices all of them have level 3, where there are ranks for it."""
    pins = request.options.strategy_pins
    degrees = math.prod(int(pins.get(name, 1)) for name in ("pp", "tp"))
    if request.slices == 1 or "zero" in pins or degrees == request.cluster.num_devices:
        return pins
    return {**pins, "zero": 3}


def _why(
    options: CompileOptions, without: Plan | None, best: PricedPipeline, best_s: float
) -> Iterator[str]:
    """What led here, and what options do not change. best_s: as simulated."""
    if without is None and not is_pipeline_pinned(options.pins):
        yield ALONE
    if options.mode == "scheduled" and best.plan.schedule.splits_backward:
        yield f"stages run eager, not {options.mode}: their schedule splits the backward itself"
    if without is not None and without.time.step_s < best.step_s:
        yield (
            f"in one pass {without.strategy.label} adds up to {seconds_text(without.time.step_s)}, "
            f"this plan to {seconds_text(best.step_s)}; as simulated, which decides, they take "
            f"{seconds_text(without.step_s)} and {seconds_text(best_s)}"
        )


def _most_stages(request: PlanRequest) -> int:
    """The most stages that are asked for; of what nobody asks for, no more than
    UNASKED_STAGES."""
    pins = request.options.pins
    default = min(request.cluster.num_devices, UNASKED_STAGES)
    virtual = 2 if pins.get("schedule") in V_ORDERS else 1
    return int(pins.get("pp", default)) * int(pins.get(VIRTUAL_STAGES, virtual))


UNASKED_STAGES = 8
"""Stages that a model with few equal layers is cut for where no pin says how many."""


def _notes(
    request: PlanRequest, problems: PipelineProblems, best: PricedPipeline
) -> tuple[str, ...]:
    """How it trains, and what is not as in the model alone."""
    notes = ["forward and backward take turns: train by train_step(batch)"]
    degrees = best.problem.degrees
    whole, pieces = len(request.folded.instances), len(problems.folded.instances)
    if whole != pieces:
        notes.append(f"fewer equal layers than stages: {whole} regions are cut into {pieces}")
    if degrees.microbatches > 1 and _updates_buffers(problems):
        notes.append(OWN_STATISTICS)
    if degrees.microbatches > 1 and degrees.degrees.zero_ranks > 1:
        notes += [_HOW_OFTEN[zero] for zero in sorted({x.strategy.zero for x in best.layers})]
    schedule, stages = best.plan.schedule, best.plan.stages
    of_devices = [HostUse()] * schedule.num_devices
    for s, stage in enumerate(stages):
        for x in best.layers[stage.first : stage.end]:
            of_devices[schedule.device_of(s)] += x.host
    most = HostUse(
        max(use.memory_bytes for use in of_devices), max(use.disk_bytes for use in of_devices)
    )
    check_host_memory(most, request.cluster)
    notes += stored_notes([x.strategy.offload for x in best.layers], most)
    return tuple(notes)


def _updates_buffers(problems: PipelineProblems) -> bool:
    """Whether the forward updates buffers, as batch norms in training do."""
    return any(region.graph.mutations for region in problems.folded.regions)


OWN_STATISTICS = (
    "batch norms take statistics of each microbatch; buffers are updated by one microbatch after "
    "the other"
)

ALONE = "nothing fits while every batch runs in one pass"
"""Why there is a pipeline that nobody pinned."""

_HOW_OFTEN = (
    "zero 0: gradients are reduced once per step",
    "zero 1: parameters are gathered and gradients reduced once per step",
    "zero 2: parameters are gathered once per step, gradients reduced with every microbatch",
    "zero 3: parameters are gathered and gradients reduced with every microbatch",
)
"""Notes by ZeRO level."""


def _one_pass_row(without: Plan | None) -> Iterator[PricedStrategy]:
    """The best plan in one pass as a baseline of a pipeline."""
    if without is not None:
        memory, step_s = without.memory, without.time.step_s
        of = without.strategy, step_s, memory.peak, memory.fits
        yield PricedStrategy("best plan in one pass", *of)


def _uniform_row(problems: PipelineProblems, tree: PipelineTree) -> tuple[PricedStrategy, ...]:
    uniform = best_uniform_pipeline(problems, tree)
    if uniform is None:
        return ()
    of = uniform.strategy, uniform.step_s, uniform.peak_bytes, True
    return (PricedStrategy("best uniform 3D", *of),)


_NOTHING = SearchStats(0, 0, 0, lower_bound_s=math.inf, least_s=math.inf)


def _stats(
    tree: PipelineTree, outcome: PipelineOutcome, without: Plan | None, best_s: float
) -> SearchStats:
    """Statistics of both searches together. best_s: of the best pipeline, as simulated."""
    best = outcome.best
    earlier = without.search if without else _NOTHING
    pruned = Counter(earlier.pruned) + Counter(tree.pruned) + Counter(outcome.pruned)
    left_out = {
        rule: n
        for rule in sorted((*RESTRICTIONS, CUT_EXPERTS))
        if (n := earlier.left_out.get(rule, 0) + tree.pruned.get(rule, 0))
    }
    left_out |= outcome.left_out
    lower_bound_s = min(outcome.lower_bound_s, earlier.lower_bound_s)
    covered = outcome.found
    if best is not None and best.plan.schedule.num_virtual_stages > 1:
        lower_bound_s = outcome.several.bound_s(min(lower_bound_s, best.step_s))
    else:
        covered = tuple(x for x in covered if x.plan.schedule.num_virtual_stages == 1)
    meshes = earlier.meshes
    if best is not None and without is not None:
        simulated = without.step_s / best_s
        meshes = tuple(_overtaken(m, best.step_s, simulated) for m in meshes)
    return replace(
        earlier,
        left_out=left_out,
        num_leaves=earlier.num_leaves + tree.num_strategies,
        num_priced=earlier.num_priced + outcome.num_priced + outcome.num_infeasible,
        num_infeasible=earlier.num_infeasible + outcome.num_infeasible,
        pruned=dict(sorted(pruned.items())),
        lower_bound_s=lower_bound_s,
        least_s=min([earlier.least_s, *(x.step_s for x in covered)]),
        gap_before=best.plan.gap_before if best else earlier.gap_before,
        unlimited_s=min(earlier.unlimited_s, best.step_s) if best else earlier.unlimited_s,
        capped=earlier.capped or bool(best and best.plan.capped),
        meshes=(*meshes, *_outcomes(outcome, without)),
    )


def _overtaken(outcome: MeshOutcome, step_s: float, simulated: float) -> MeshOutcome:
    """A mesh that the plan in one pass took, seen from a faster pipeline. simulated: the ratio of
    their steps."""
    if outcome.reason != "taken" or outcome.step_s is None:
        return outcome
    reason = f"{outcome.step_s / step_s:.2f} of this plan's time, {simulated:.2f} as simulated"
    return replace(outcome, reason=reason)


def _outcomes(outcome: PipelineOutcome, without: Plan | None) -> list[MeshOutcome]:
    """One row per choice of degrees whose stages were searched."""
    best = outcome.best
    found = []
    for degrees, bound_s, step_s in outcome.searched:
        if step_s is None:
            reason = "has no plan that fits and is faster"
        elif best is None:
            is_less = without is not None and step_s < without.step_s
            reason = "hardly faster, or not as simulated" if is_less else "slower than in one pass"
        elif degrees == best.problem.degrees:
            step_s, reason = best.step_s, "taken"
        else:
            reason = f"{step_s / best.step_s:.2f} of this plan's time"
        bound_s = bound_s if math.isfinite(bound_s) else 0.0
        found.append(MeshOutcome(degrees.label, bound_s, step_s, reason))
    return found


def too_many_ranks(options: CompileOptions, tp: Collection[int]) -> OptionError:
    """What is wrong with these degrees, of which none shards a parameter."""
    degrees_text = ", ".join(f"tp={degree}" for degree in sorted(tp))
    return OptionError(
        f"{'pin ' if 'tp' in options.pins else ''}{degrees_text}: no parameter of this model can "
        "be sharded over so many ranks"
    )


def _no_plan(
    options: CompileOptions, problems: PipelineProblems, tree: PipelineTree
) -> OptionError | InfeasibleError:
    candidates = tree.candidates
    if candidates and not any(shards_weights(problems, tree, x) for x in candidates):
        return too_many_ranks(options, {degrees.tp for degrees in candidates})
    available = bytes_text(problems.capacity_bytes)
    return InfeasibleError(
        f"found nothing that fits in {available} per device on {problems.cluster.num_devices} "
        f"devices, with or without a pipeline ({len(tree.candidates)} choices of pp x dp x ep x cp "
        "x tp and microbatches); use more devices, more memory or a smaller batch",
        binding_constraint="memory",
        available_bytes=problems.capacity_bytes,
    )
