"""Random run problems and brute force over them."""

import itertools
import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from meshfold.passes.run.chain import close_conversions
from meshfold.passes.run.problem import LayerType, Run, RunProblem


@st.composite
def layer_types(
    draw: st.DrawFn, name: str, num_layouts: int, most_strategies: int = 4
) -> LayerType:
    """A small table. Whole and broken times: the first make ties, the second make none."""
    size = draw(st.integers(1, most_strategies))
    scale = draw(st.sampled_from([1.0, 0.137]))
    times = draw(st.lists(st.integers(1, 30), min_size=size, max_size=size))
    memory = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    layouts = draw(st.lists(st.integers(0, num_layouts - 1), min_size=size, max_size=size))
    return LayerType(
        name,
        tuple(draw(st.permutations([f"s{i}" for i in range(size)]))),
        np.array(times) * scale,
        np.array(memory, np.int64),
        np.array(layouts, np.int64),
    )


@st.composite
def run_problems(draw: st.DrawFn, most_layouts: int = 3) -> RunProblem:
    """One to three runs of at most six layers in all, with a budget around the least memory."""
    num_layouts = draw(st.integers(1, most_layouts))
    types = [draw(layer_types(f"t{i}", num_layouts)) for i in range(draw(st.integers(1, 3)))]
    num_runs = draw(st.integers(1, 3))
    counts = st.integers(1, {1: 5, 2: 3, 3: 2}[num_runs])
    runs = tuple(Run(draw(st.sampled_from(types)), draw(counts)) for _ in range(num_runs))
    size = num_layouts * num_layouts
    flat = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    conversion_s = np.array(flat, float).reshape(num_layouts, num_layouts)
    fixed = draw(st.integers(0, 5))
    least = RunProblem(runs, None, fixed, conversion_s).least_bytes
    return RunProblem(runs, least + draw(st.integers(-2, 40)), fixed, conversion_s)


def brute_force_s(problem: RunProblem) -> float:
    """The least time over every assignment of strategies to layers; infinite if none fits."""
    layers = [run.layer_type for run in problem.runs for _ in range(run.count)]
    closed = None if problem.conversion_s is None else close_conversions(problem.conversion_s)
    best_s = math.inf
    for picks in itertools.product(*(range(len(layer.strategies)) for layer in layers)):
        pairs = list(zip(layers, picks, strict=True))
        memory = problem.fixed_bytes + sum(int(t.memory_bytes[k]) for t, k in pairs)
        if problem.budget_bytes is not None and memory > problem.budget_bytes:
            continue
        time_s = sum(float(t.time_s[k]) for t, k in pairs)
        if closed is not None:
            ids = [0 if t.layouts is None else int(t.layouts[k]) for t, k in pairs]
            time_s += sum(float(closed[a, b]) for a, b in itertools.pairwise(ids))
        best_s = min(best_s, time_s)
    return best_s


Group = tuple[int, np.ndarray, np.ndarray]
"""Number of layers; (measure, strategy) -> seconds; memory per strategy."""


@st.composite
def group_lists(draw: st.DrawFn, num_measures: int) -> tuple[list[Group], int]:
    """One or two groups of layers and a budget that at least the least memory fits."""
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        size = draw(st.integers(1, 4))
        numbers = st.lists(st.integers(1, 30), min_size=size, max_size=size)
        scale = draw(st.sampled_from([1.0, 0.137]))
        measures = np.array([draw(numbers) for _ in range(num_measures)]) * scale
        memory = np.array(draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)))
        groups.append((draw(st.integers(1, 4)), measures, memory))
    least = sum(count * int(memory.min()) for count, _, memory in groups)
    return groups, least + draw(st.integers(0, 40))


def least_over_counts(
    groups: list[Group], value: Callable[[np.ndarray], float], budget_bytes: int
) -> float:
    """The least value of the summed measures over all counts that fit."""
    choices = [
        itertools.combinations_with_replacement(range(len(memory)), count)
        for count, _, memory in groups
    ]
    best_s = math.inf
    for combination in itertools.product(*choices):
        pairs = [(group, list(picks)) for group, picks in zip(groups, combination, strict=True)]
        if sum(int(memory[picks].sum()) for (_, _, memory), picks in pairs) <= budget_bytes:
            sums = sum(measures[:, picks].sum(axis=1) for (_, measures, _), picks in pairs)
            best_s = min(best_s, value(sums))
    return best_s


def random_type(
    rng: np.random.Generator, name: str, num_strategies: int, num_layouts: int = 1
) -> LayerType:
    """A table as real ones look: less memory costs time, with scatter. Times near 10 ms."""
    memory = rng.lognormal(0, 1, num_strategies)
    times = 0.01 * memory**-0.5 * rng.uniform(1, 1.6, num_strategies)
    return LayerType(
        name,
        tuple(f"s{i:03}" for i in range(num_strategies)),
        times,
        (memory * 1e9).astype(np.int64),
        rng.integers(0, num_layouts, num_strategies),
    )


def tight_problem(
    runs: tuple[Run, ...], share: float, conversion_s: np.ndarray | None = None
) -> RunProblem:
    """A budget at `share` of the way from the least to the most memory."""
    least = RunProblem(runs).least_bytes
    most = sum(run.count * int(run.layer_type.memory_bytes.max()) for run in runs)
    return RunProblem(runs, int(least + share * (most - least)), 0, conversion_s)
