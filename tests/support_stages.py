"""Random stage problems, and their best plan by trying every cut and every strategy."""

import itertools

import numpy as np
from hypothesis import strategies as st

from meshfold.cost_models.pipeline.makespan import StageTimes, device_ends_s
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind, held_by_chunk
from meshfold.passes.stages.problem import LayerCosts, LayerRun, StageProblem


def layer_costs(name, draws, num_strategies=3, *, sync=False, transient=False, scale=1.0):
    """A layer type whose fast strategies take more memory; `draws` is a numpy Generator."""
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
        transient_bytes=draws.integers(0, 12, n) if transient else 0,
    )


def random_problem(seed):
    """At most 6 layers of up to 3 types on at most 3 devices, with every feature now and then."""
    draws = np.random.default_rng(seed)
    types = [
        layer_costs(f"t{i}", draws, sync=seed % 5 == 0, transient=seed % 4 == 0)
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
        held_bytes=draws.integers(0, 4, num_layers) * (seed % 7 == 0),
    )


def interleaved_schedules(problem):
    """With as many chunks per device as there are layers for."""
    p, m = problem.num_devices, problem.num_microbatches
    if p == 1 or m % p:
        return []
    kind = ScheduleKind.INTERLEAVED
    return [Schedule(kind, p, m, num_chunks=v) for v in range(2, problem.num_layers // p + 1)]


def allowed_schedules(problem):
    """All schedules of one chunk per device, at every warm-up depth."""
    p, m = problem.num_devices, problem.num_microbatches
    deepened = [
        Schedule(kind, p, m, extra_warm_up=extra)
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
        for extra in range(p)
    ]
    return [Schedule(ScheduleKind.GPIPE, p, m), *deepened]


def all_cuts(num_layers, p):
    for inner in itertools.combinations(range(1, num_layers), p - 1):
        yield (0, *inner, num_layers)


def brute_force_s(problem, schedules):
    """Least step time over all cuts, strategies and schedules; infinite where nothing fits."""
    return min(
        best_of_cut_s(problem, schedule, cuts)
        for schedule in schedules
        for cuts in all_cuts(problem.num_layers, schedule.num_stages)
    )


def best_of_cut_s(problem, schedule, cuts):
    """Least step time of one cut over all strategies."""
    p = problem.num_devices
    options = [
        _device_options(
            problem, [cuts[s : s + 2] for s in range(i, len(cuts) - 1, p)], held, budget
        )
        for i, (held, budget) in enumerate(
            zip(held_by_chunk(schedule), problem.memory_bytes, strict=True)
        )
    ]
    hop_s = problem.hop_s[list(cuts[1:-1])]
    best_s = np.inf
    for chosen in itertools.product(*options):
        # [device][chunk] -> seconds; stages in order are chunk by chunk.
        parts = np.array(chosen)
        forward_s, backward_s, weight_s, sync_s = parts.swapaxes(0, 1).reshape(-1, 4).T
        times = StageTimes.build(forward_s, backward_s, weight_s=weight_s, hop_s=hop_s)
        late_s = parts[:, :, 3].sum(axis=1)
        best_s = min(best_s, float((device_ends_s(schedule, times) + late_s).max()))
    return best_s


def _device_options(problem, spans, held, budget):
    """Per chunk (forward, backward, weight, sync) of every assignment that fits and no other beats
    in each pass: the makespan grows with each of them. held: moments of held_by_chunk."""
    layers = [
        (chunk, problem.runs[run].layer)
        for chunk, (first, end) in enumerate(spans)
        for run, n in problem.pieces(first, end)
        for _ in range(n)
    ]
    found = set()
    for choice in itertools.product(*(range(len(layer.strategies)) for _, layer in layers)):
        picked = [(chunk, layer, s) for (chunk, layer), s in zip(layers, choice, strict=True)]
        memory = max(
            sum(n * problem.held_bytes[first] for n, (first, _) in zip(ns, spans, strict=True))
            + sum(c.state_bytes[s] + ns[chunk] * c.activation_bytes[s] for chunk, c, s in picked)
            for ns in held
        )
        if memory + max(c.transient_bytes[s] for _, c, s in picked) <= budget:
            found.add(tuple(_seconds(picked, chunk) for chunk in range(len(spans))))
    parts = {tuple(x for f, b, w, y in o for x in (f, b - w, w, y)): o for o in found}
    return [
        option
        for part, option in parts.items()
        if not any(o != part and all(x <= y for x, y in zip(o, part, strict=True)) for o in parts)
    ]


def _seconds(picked, chunk):
    keys = ("forward_s", "backward_s", "weight_s", "sync_s")
    return tuple(float(sum(getattr(c, key)[s] for k, c, s in picked if k == chunk)) for key in keys)


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
