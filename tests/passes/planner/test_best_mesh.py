"""Meshes whose bound is between the best sum and the best simulated step are planned, too."""

from dataclasses import replace

import pytest
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import MeshOutcome, Plan
from meshfold.ir.strategy import BESIDE_SELECTIVE
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


def test_programs_without_light_and_heavy_layers_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some memory budget has layers recompute lightly or heavily; where such programs simulate ten
    times as slow as they add up, the plan has none."""

    def tight(budget: int | None) -> Plan:
        return find_plan_for(
            graph,
            resolve_cluster("local-cpu", 2),
            CompileOptions(pins={"microbatches": 1}, memory_bytes=budget),
            model_name="gpt2",
            batch_size=BATCH,
            probe=probe,
        )

    def besides(found: Plan) -> bool:
        return any(r.strategy.recompute in BESIDE_SELECTIVE for r in found.regions)

    graph, probe = capture(*tiny_model("gpt2", layers=4)).graph, OpProber()
    ample = tight(None).memory
    budgets = [ample.peak - k * (ample.peak - ample.reserve) // 40 for k in range(2, 16)]
    budget = next(b for b in budgets if besides(tight(b)))
    right = shortlist.simulated

    def slow(listed: Shortlisted) -> Shortlisted:
        found = right(listed)
        assert found.step is not None
        if all(c.strategy.recompute not in BESIDE_SELECTIVE for c in listed.priced.candidates):
            return found
        added_s = 10 * listed.priced.time.step_s
        return replace(found, step=replace(found.step, exposed_s=added_s))

    for where in (shortlist, best_mesh):
        monkeypatch.setattr(where, "simulated", slow)
    plain = tight(budget)
    assert not besides(plain) and plain.memory.fits
    assert {mesh.reason for mesh in plain.search.meshes} >= {"taken"}
