"""Searches that share work find what they find alone."""

from functools import cache

import pytest
from support.processes.offload import cluster_with_hosts
from support.programs.local_programs import stack_model

from meshfold.capture.pipeline import capture
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.shared_work import SharedWork

PROBER, SHARED = OpProber(), SharedWork()
BATCH = 8


@cache
def graph() -> FoldedGraph:
    model, batch = stack_model(4, 64, BATCH)
    return capture(model, batch).graph


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_bytes": 1_200_000},
        {"pins": {"tp": 2}},
        {"pins": {"pp": 2, "microbatches": 2}},
        {"pins": {"layout:*.weight": "replicate"}},
        {"optimizer": "sgd", "pins": {"microbatches": 2}},
    ],
    ids=str,
)
def test_a_plan_does_not_depend_on_the_searches_before_it(options) -> None:
    of = {"model_name": "stack", "batch_size": BATCH, "probe": PROBER}
    given = graph(), cluster_with_hosts(2), CompileOptions(**options)
    assert find_plan_for(*given, shared=SHARED, **of) == find_plan_for(*given, **of)
