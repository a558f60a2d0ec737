"""Programs that may win once they are emitted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.schedules import captured_family

from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.simulation.streams import Streams
from meshfold.ir.options import CompileOptions
from meshfold.ir.step_events import CollectiveEvent
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.rivals import MOST_RIVALS, least_step_s
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find import find_finalists, find_plan_for


def test_the_least_step_by_hand() -> None:
    assert least_step_s(3.0, {}, 1.5) == 3.0
    assert least_step_s(3.0, {"a": 1.0, "b": 2.0}, 1.0) == 3.0
    assert least_step_s(3.0, {"a": 1.0, "b": 2.0}, 1.5) == 3.0 + 0.5 * 2.0
    assert least_step_s(3.0, {"a": 4.0}, 1.5) == 4.0 + 0.5 * 3.0


pieces = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), min_size=1, max_size=6)


@given(pieces, st.floats(1.0, 2.0), st.lists(st.booleans(), min_size=6, max_size=6))
def test_no_order_of_streams_takes_less(
    work: list[tuple[float, float]], slowdown: float, waits: list[bool]
) -> None:
    streams = Streams(slowdown)
    flying = []
    for (compute_s, seconds), is_waited in zip(work, waits, strict=False):
        flying.append(streams.start(CollectiveEvent("all_reduce", ("dp",), "a", 1, seconds)))
        streams.compute(compute_s)
        if is_waited:
            streams.wait(flying[-1])
    for transfer in flying:
        streams.wait(transfer)
    of = sum(s for s, _ in work), {"a": sum(s for _, s in work)}
    assert streams.now_s >= least_step_s(*of, slowdown) * (1 - 1e-9)


def test_rivals_are_few_and_the_plan_is_the_first() -> None:
    graph = captured_family("llama").graph
    cluster, options = resolve_cluster("local-cpu", 4), CompileOptions(pins={"microbatches": 1})
    probe, batch = OpProber(), graph.batch_size
    assert batch
    of = graph, cluster, options, "llama", batch, probe
    first, *others = find_finalists(PlanRequest(*of, wants_rivals=True))
    assert len(others) <= MOST_RIVALS
    assert first == find_plan_for(
        graph, cluster, options, model_name="llama", batch_size=batch, probe=probe
    )
    assert len({str(plan.mesh) for plan in (first, *others)}) == 1 + len(others)
    for plan in others:
        taken = [outcome.mesh for outcome in plan.search.meshes if outcome.reason == "taken"]
        assert taken == [str(plan.mesh)] and plan.search.lower_bound_s == first.search.lower_bound_s


@pytest.mark.parametrize("wants_rivals", [False, True])
def test_nobody_gets_rivals_unasked(wants_rivals: bool) -> None:
    graph = captured_family("llama").graph
    assert graph.batch_size
    pins = {"microbatches": 1, "dp": 4}
    of = graph, resolve_cluster("local-cpu", 4), CompileOptions(pins=pins), "llama"
    found = find_finalists(
        PlanRequest(*of, graph.batch_size, OpProber(), wants_rivals=wants_rivals)
    )
    assert len(found) == 1  # there is one mesh
