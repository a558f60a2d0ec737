"""Random stage problems, and their best plan by trying every division and every strategy."""

import itertools

import numpy as np
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import (
    Schedule,
    ScheduleKind,
    counted_in_flight,
)
from meshfold.passes.stages.answer import PipelinePlan
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem
from meshfold.passes.stages.schedules import offered_schedules
from meshfold.passes.stages.search import search_faster_stages


def search_stages(problem, schedules=None, **options):
    """The best plan under any of the schedules (None: default_schedules); None if nothing fits."""
    schedules = default_schedules(problem) if schedules is None else schedules
    found = search_faster_stages(problem, schedules, np.inf, **options)
    return found if isinstance(found, PipelinePlan) else None


def default_schedules(problem):
    """The offered ones; a split backward only where the time of weight gradients is known."""
    has_weights = any(run.layer.weight_s.any() for run in problem.runs)
    sizes = problem.num_devices, problem.num_microbatches, problem.num_layers
    return [s for s in offered_schedules(*sizes) if has_weights or not s.splits_backward]


def layer_costs(
    name,
    draws,
    num_strategies=3,
    *,
    sync=False,
    transient=0,
    scale=1.0,
    put_off=False,
    update=False,
):
    """A layer type whose fast strategies take more memory; `draws` is a numpy Generator. transient:
    their bytes are below it. put_off: as many bytes from B to W as are drawn, otherwise those of
    the activations."""
    n = num_strategies
    forward_s = np.sort(draws.integers(2, 12, n)) * scale
    backward_s = draws.integers(4, 24, n) * scale
    return LayerCosts.build(
        name,
        tuple(f"s{i}" for i in range(n)),
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=backward_s * draws.choice([0.0, 0.25, 0.5]),
        sync_s=draws.integers(0, 20, n) if sync else 0,
        state_bytes=np.sort(draws.integers(1, 30, n))[::-1],
        activation_bytes=np.sort(draws.integers(0, 8, n))[::-1],
        transient_bytes=draws.integers(0, transient, n) if transient else 0,
        put_off_bytes=draws.integers(0, 12) if put_off else None,
        update_bytes=draws.integers(0, 20, n) if update else 0,
    )


def random_problem(seed):
    """A problem of at most 6 layers of up to 3 types on at most 3 devices, every feature now and
    then."""
    draws = np.random.default_rng(seed)
    types = [
        layer_costs(
            f"t{i}",
            draws,
            sync=seed % 5 == 0,
            transient=12 * (seed % 4 == 0),
            put_off=seed % 2 == 0,
            update=seed % 3 == 1,
        )
        for i in range(int(draws.integers(1, 4)))
    ]
    runs = tuple(LayerRun(layer, int(draws.integers(1, 5 - len(types)))) for layer in types)
    num_layers = sum(run.count for run in runs)
    p = int(draws.integers(1, min(3, num_layers) + 1))
    return StageProblem.build(
        runs,
        num_stages=p,
        num_microbatches=int(draws.integers(1, 9)),
        memory_bytes=draws.integers(25, 160, p),
        hop_s=draws.integers(0, 6, num_layers - 1) * (seed % 3 > 0),
        resident_bytes=draws.integers(0, 4, num_layers) * (seed % 7 == 0),
    )


def interleaved_schedules(problem):
    """Schedules with as many virtual stages per device as there are layers for."""
    p, m = problem.num_devices, problem.num_microbatches
    if p == 1 or m % p:
        return []
    kind = ScheduleKind.INTERLEAVED
    return [
        Schedule(kind, p, m, num_virtual_stages=v) for v in range(2, problem.num_layers // p + 1)
    ]


def allowed_schedules(problem):
    """All schedules of one virtual stage per device, at every warm-up depth."""
    p, m = problem.num_devices, problem.num_microbatches
    deepened = [
        Schedule(kind, p, m, extra_warm_up=extra)
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
        for extra in range(p)
    ]
    return [Schedule(ScheduleKind.GPIPE, p, m), *deepened]


def all_boundaries(num_layers, p):
    for inner in itertools.combinations(range(1, num_layers), p - 1):
        yield (0, *inner, num_layers)


def brute_force_s(problem, schedules):
    """Least step time over all divisions, strategies and schedules; infinite where nothing fits."""
    return min(
        best_of_boundaries_s(problem, schedule, boundaries)
        for schedule in schedules
        for boundaries in all_boundaries(problem.num_layers, schedule.num_stages)
    )


def best_of_boundaries_s(problem, schedule, boundaries):
    """Least step time of one division over all strategies."""
    options = [
        _device_options(
            problem, [boundaries[s : s + 2] for s in schedule.stages_of(i)], held, budget
        )
        for i, (held, budget) in enumerate(
            zip(counted_in_flight(schedule), problem.memory_bytes, strict=True)
        )
    ]
    hop_s = problem.hop_s[list(boundaries[1:-1])]
    best_s = np.inf
    for chosen in itertools.product(*options):
        # [device][virtual stage] -> seconds.
        parts = np.array(chosen)
        by_stage = {
            s: parts[i, k]
            for i in range(schedule.num_devices)
            for k, s in enumerate(schedule.stages_of(i))
        }
        forward_s, backward_s, weight_s, _ = np.array([by_stage[s] for s in sorted(by_stage)]).T
        times = StageTimes.build(forward_s, backward_s, weight_s=weight_s, hop_s=hop_s)
        late_s = parts[:, :, 3].sum(axis=1)
        best_s = min(best_s, float((device_ends_s(schedule, times) + late_s).max()))
    return best_s


def kept_bytes(in_flight, each, update_bytes):
    """Of a layer, with so many microbatches before B and between B and W."""
    kept = sum(n * x for n, x in zip(in_flight, each, strict=False))
    return max(kept, update_bytes) if sum(in_flight) else kept


def _device_options(problem, spans, held, budget):
    """Per virtual stage (forward, backward, weight, sync) of every assignment that fits and no
    other beats in each pass: the makespan grows with each of them. held: of
    counted_in_flight."""
    layers = [
        (virtual_stage, problem.runs[run].layer)
        for virtual_stage, (first, end) in enumerate(spans)
        for run, n in problem.run_slices(first, end)
        for _ in range(n)
    ]
    found = set()
    for choice in itertools.product(*(range(len(layer.strategies)) for _, layer in layers)):
        picked = [
            (virtual_stage, layer, s)
            for (virtual_stage, layer), s in zip(layers, choice, strict=True)
        ]
        memory = max(
            sum(n * problem.resident_bytes[first] for n, (first, _) in zip(ns, spans, strict=False))
            + sum(
                c.state_bytes[s]
                + kept_bytes(
                    (ns[virtual_stage], sum(ns[len(spans) + virtual_stage :][:1])),
                    (c.activation_bytes[s], c.put_off_bytes[s]),
                    c.update_bytes[s],
                )
                for virtual_stage, c, s in picked
            )
            for ns in held
        )
        if memory + max(c.transient_bytes[s] for _, c, s in picked) <= budget:
            found.add(tuple(_seconds(picked, virtual_stage) for virtual_stage in range(len(spans))))
    parts = {tuple(x for f, b, w, y in o for x in (f, b - w, w, y)): o for o in found}
    return [
        option
        for part, option in parts.items()
        if not any(o != part and all(x <= y for x, y in zip(o, part, strict=True)) for o in parts)
    ]


def _seconds(picked, virtual_stage):
    keys = ("forward_s", "backward_s", "weight_s", "sync_s")
    return tuple(
        float(sum(getattr(c, key)[s] for k, c, s in picked if k == virtual_stage)) for key in keys
    )


seeds = st.integers(0, 10**9)


def deep_problem(num_layers=32, p=4, m=16, *, hop_s=0.0, memory_bytes=420, scale=1.0):
    """An embedding, equal layers and a head on p stages with m microbatches. scale: of layer
    times."""
    draws = np.random.default_rng(11)
    runs = (
        LayerRun(layer_costs("embedding", draws), 1),
        LayerRun(layer_costs("layer", draws, 8, scale=scale), num_layers - 2),
        LayerRun(layer_costs("head", draws), 1),
    )
    return StageProblem.build(
        runs, num_stages=p, num_microbatches=m, memory_bytes=memory_bytes, hop_s=hop_s
    )
