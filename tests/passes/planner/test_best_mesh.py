"""Meshes whose bound is between the best sum and the best simulated step are planned, too."""

from dataclasses import replace

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import MeshOutcome, Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass import shortlist
from meshfold.passes.one_pass.shortlist import Shortlisted
from meshfold.passes.planner import best_mesh
from meshfold.passes.planner.best_mesh import BOUND
from meshfold.passes.planner.find import find_plan_for


def plan() -> Plan:
    return find_plan_for(
        capture(*tiny_model("llama")).graph,
        resolve_cluster("local-cpu", 4),
        CompileOptions(pins={"microbatches": 1}),
        model_name="llama",
        batch_size=BATCH,
        probe=OpProber(),
    )


def planned(found: Plan) -> list[MeshOutcome]:
    return [mesh for mesh in found.search.meshes if mesh.step_s is not None]


def test_what_simulates_slower_than_it_adds_up_brings_others_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here every program of the shortlist takes ten times its sum, as if links were shared: others
    are planned, MOST_BEYOND of them at most, and the first that does not is taken."""
    first = plan()
    right = shortlist.simulated

    def slow(listed: Shortlisted) -> Shortlisted:
        found = right(listed)
        assert found.step is not None
        if str(listed.planner.mesh) not in {mesh.mesh for mesh in planned(first)}:
            return found
        return replace(found, step=replace(found.step, exposed_s=10 * first.step_s))

    for where in (shortlist, best_mesh):
        monkeypatch.setattr(where, "simulated", slow)
    second = plan()
    more = {m.mesh for m in planned(second)} - {m.mesh for m in planned(first)}
    assert 1 <= len(more) <= shortlist.MOST_BEYOND
    assert str(second.mesh) in more
    # Who was planned is no longer counted as left out by its bound, and the bound is still one.
    assert second.search.pruned.get(BOUND, 0) < first.search.pruned[BOUND]
    assert second.search.lower_bound_s <= first.search.lower_bound_s
    counts = [p.search.num_leaves - sum(p.search.pruned.values()) for p in (first, second)]
    assert counts[1] > counts[0] > 0


def test_where_the_sum_is_the_step_nothing_else_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = plan()
    right = shortlist.simulated

    def as_added_up(listed: Shortlisted) -> Shortlisted:
        found = right(listed)
        assert found.step is not None
        less_s = found.step.step_s - listed.priced.time.step_s
        return replace(found, step=replace(found.step, exposed_s=found.step.exposed_s - less_s))

    monkeypatch.setattr(shortlist, "simulated", as_added_up)
    second = plan()
    assert len(planned(second)) <= len(planned(first))
