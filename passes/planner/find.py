"""The plan of a folded program on a cluster, with the proof of how good it is.

    decision tree (one_pass/tree.py)   what is left of dp x ep x cp x tp, ZeRO, recomputation
        -> meshes in order of their bound, which rises while their regions are typed one by one
           (one_pass/candidate_mesh.py, region/typing.py)
        -> the best program on each, strategies mixed by layer (one_pass/search.py), until the next
           bound reaches the best program found
        -> Plan, with the lower bound, the pruning and the named baselines

Ties are broken by (step time to seven digits, regions to emit, peak memory, label): same input,
same plan.
"""

from dataclasses import replace

from meshfold.errors import InfeasibleError, OptionError
from meshfold.gc_pause import collector_paused
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.stage_pins import excludes_pipelines, is_pipeline_pinned
from meshfold.passes.memory.local_program import Probe
from meshfold.passes.one_pass.tree import PRUNING_RULES
from meshfold.passes.planner.accumulation import fitting_rows
from meshfold.passes.planner.assembly import PlanRequest, assemble_plan
from meshfold.passes.planner.baselines import baseline_rows, named_baselines
from meshfold.passes.planner.best_mesh import BOUND, MeshRace, Progress, planner_of
from meshfold.passes.planner.chunked_loss import NEEDS_CHUNKS, fitting
from meshfold.passes.planner.find_pipeline import (
    plan_with_pipelines,
)
from meshfold.passes.planner.memory_prices import MOST_SEARCHES, regions_of, with_prices
from meshfold.passes.planner.offload import NEEDS_OFFLOAD, host_notes, within
from meshfold.passes.planner.shared_work import SharedWork


@collector_paused()
def find_plan_for(
    folded: FoldedGraph,
    cluster: ClusterSpec,
    options: CompileOptions,
    *,
    model_name: str,
    batch_size: int,
    probe: Probe,
    progress: Progress | None = None,
    shared: SharedWork | None = None,
    prices_memory: bool = False,
) -> Plan:
    """The fastest plan on all devices of `cluster` that fits the memory budget: in one pass, with
    the batch in microbatches, or with the model in stages, whichever wins. Where nothing fits
    without, losses make their logits in chunks, optimizer states go to the host, or both; the
    latter, too, where what fits is slow for lack of memory.

    batch_size: global batch, the size of dim 0 of the inputs that are to be sharded. probe: what
    the memory model asks about local ops. shared: what earlier searches for the same graph, cluster
    and batch left; the plan does not depend on it. prices_memory: a note says what the budget
    costs. Raises OptionError for a pin or batch that cannot be kept, InfeasibleError when nothing
    fits."""
    shared = shared or SharedWork()
    request = PlanRequest(folded, cluster, options, model_name, batch_size, probe, shared)
    plan = find_finalists(request, progress)[0]
    return with_memory_note(plan, request, prices_memory=prices_memory)


@collector_paused()
def find_finalists(request: PlanRequest, progress: Progress | None = None) -> tuple[Plan, ...]:
    """The plan of find_plan_for, and behind it, where the request wants them, rivals: plans that
    may be faster than it once they are emitted. All are in the first mode of the options."""
    return fitting(request, lambda asked: _plans(asked, progress))


@collector_paused()
def with_memory_note(plan: Plan, request: PlanRequest, *, prices_memory: bool) -> Plan:
    """`plan`, one of those that were found for the request, with a note of what its memory budget
    costs, as far as that is wanted."""
    if not prices_memory and not {NEEDS_CHUNKS, NEEDS_OFFLOAD}.intersection(plan.notes):
        return plan
    alone = _quick(request, plan)

    def plan_in(num_bytes: int) -> Plan:
        return fitting(within(alone, num_bytes), lambda asked: _plans(asked, None))[0]

    # Offload that nobody asked for says what it costs in any case, by one search.
    return with_prices(plan, plan_in, MOST_SEARCHES if prices_memory else 0)


def _quick(request: PlanRequest, plan: Plan) -> PlanRequest:
    """The request as budgets are searched that nobody asks for, beside `plan`: without what finds
    the last per cent, and without offload where the plan has none, as they are larger ones."""
    options = request.options
    if all(region.strategy.offload == "none" for region in regions_of(plan)):
        options = replace(options, pins={**options.pins, "offload": "none"})
    return replace(request, options=options, num_starts=0, wants_rivals=False)


def _plans(request: PlanRequest, progress: Progress | None) -> tuple[Plan, ...]:
    """The fastest plan of what is asked for, and its rivals."""
    options = request.options
    needs_pipeline = is_pipeline_pinned(options.pins)
    _check_options(options, needs_pipeline)
    if needs_pipeline:
        return plan_with_pipelines(request, ())
    plans: tuple[Plan, ...] = ()
    no_pass: OptionError | InfeasibleError | None = None
    one_pass_only = request.in_one_pass or excludes_pipelines(options.pins)
    try:
        plans = _plans_in_one_pass(request, progress)
        if one_pass_only:
            baselines = fitting_rows(request, plans[0].baselines)
            return tuple(replace(plan, baselines=baselines) for plan in plans)
    except (OptionError, InfeasibleError) as error:
        # Pins of dp and tp that leave devices over may ask for stages.
        if one_pass_only:
            raise
        no_pass = error
    try:
        return plan_with_pipelines(request, plans)
    except InfeasibleError as error:
        if isinstance(no_pass, InfeasibleError):
            raise no_pass from error  # it says what is missing without a pipeline
        raise
    except OptionError as error:
        if no_pass is None:
            raise
        raise no_pass from error


def _plans_in_one_pass(request: PlanRequest, progress: Progress | None) -> tuple[Plan, ...]:
    """The fastest plan that runs the batch of a rank in one pass, and its rivals."""
    search = MeshRace(request, progress)
    found = search.best()
    options, batch_size = request.options, request.batch_size
    unpinned = search
    if options.layout_pins:
        free = replace(options, pins=options.strategy_pins)
        unpinned = MeshRace(replace(request, options=free), None)
    named = named_baselines(request.cluster)
    rows = {
        name: planner_of(s, found, unpinned).uniform(s)
        for name, s in named.items()
        if batch_size % s.dp == 0
    }
    baselines = baseline_rows(rows, found.planners)
    unpriced = [
        f"baseline {name} is not priced: a batch of {batch_size} does not divide over {s.dp} ranks"
        for name, s in named.items()
        if name not in rows
    ]
    return tuple(
        assemble_plan(
            request,
            listed,
            baselines=baselines,
            stats=stats,
            notes=(
                *found.notes,
                *host_notes(listed.priced, options.optimizer, request.cluster),
                *unpriced,
            ),
        )
        for listed, stats in ((found.best, found.stats), *found.rivals)
    )


def _check_options(options: CompileOptions, needs_pipeline: bool) -> None:
    known = (*PRUNING_RULES, BOUND)
    for name in options.without_rules:
        if name not in known:
            raise OptionError(f"no pruning is called {name!r}; they are {', '.join(known)}")
    if needs_pipeline and options.layout_pins:
        raise OptionError(
            f"pin {options.layout_pins[0]}: layouts cannot be pinned in a pipeline yet; leave it "
            "out, or the pipeline"
        )
