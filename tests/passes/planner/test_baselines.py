"""Baselines: what a plan is compared with."""

import pytest
from support.search.pipelines import graph_of, problems_of, slow_links, tree_for

from meshfold.passes.planner.baselines import (
    best_uniform_pipeline,
    even_boundaries,
    uniform_bound_s,
    uniform_pipeline,
)


@pytest.mark.parametrize("memory_bytes", [None, 450_000])
def test_the_uniform_pipeline_is_the_best_of_all(memory_bytes):
    problems, tree = problems_of(slow_links(4), memory_bytes=memory_bytes), tree_for(4)
    found = []
    for degrees in tree.candidates:
        for strategy in tree.strategies_of(degrees):
            priced = uniform_pipeline(problems, strategy)
            if priced is not None:
                assert uniform_bound_s(problems, strategy) <= priced.step_s * (1 + 1e-9)
                found.append(priced)
    best = best_uniform_pipeline(problems, tree)
    assert best is not None
    assert best.step_s == pytest.approx(min(x.step_s for x in found), rel=1e-8)
    assert best in found


def test_even_boundaries_keep_the_ends_apart():
    assert even_boundaries(graph_of("llama"), 2) == [0, 2, 4]
    assert even_boundaries(graph_of("llama"), 4) == [0, 1, 2, 3, 4]
