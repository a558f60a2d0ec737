"""The mode is chosen by simulation of emitted programs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.programs.pipeline import without_start_up
from support.programs.schedules import captured_family

from meshfold.api import plan_captured
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.options import CompileOptions, ModeChoice
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.rivals import LEAST_GAIN, least_step_s
from meshfold.passes.planner.assembly import PlanRequest
from meshfold.passes.planner.find import find_finalists
from meshfold.refine.finalists import by_link_s, fastest

TP: Mapping[str, Any] = {"tp": 4, "sp": 1, "microbatches": 1}
ANY: Mapping[str, Any] = {"microbatches": 1}


@cache
def cluster(bytes_per_s: float = 1e9) -> ClusterSpec:
    """Four processes on a link of that rate, whose kernels and collectives start at once."""
    found = without_start_up(resolve_cluster("local-cpu", 4))
    (group,) = found.groups
    link = replace(group.link, bytes_per_s=bytes_per_s, bytes_per_s_by_ranks=())
    return replace(found, groups=(replace(group, link=link),))


@cache
def planned(family: str, mode: ModeChoice, bytes_per_s: float, is_pinned: bool) -> Plan:
    options = CompileOptions(mode=mode, pins=TP if is_pinned else ANY)
    return plan_captured(captured_family(family), family, cluster(bytes_per_s), options)


CASES = [
    ("llama", 1e7, True),
    ("llama", 1e8, False),
    pytest.param("gpt2", 1e9, True, marks=pytest.mark.slow),
    pytest.param("bert", 1e8, False, marks=pytest.mark.slow),
    pytest.param("mixtral", 1e8, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "bytes_per_s", "is_pinned"), CASES)
def test_auto_is_never_slower_than_a_mode(family: str, bytes_per_s: float, is_pinned: bool) -> None:
    of = family, bytes_per_s, is_pinned
    auto, *pinned = (planned(of[0], mode, *of[1:]) for mode in ("auto", "eager", "scheduled"))
    assert auto.asked_mode == "auto" and auto.mode in ("eager", "scheduled")
    for plan in pinned:
        assert auto.step_s <= plan.step_s / (1 - LEAST_GAIN)
    assert auto.simulated is not None and auto.simulated.peak_bytes <= auto.memory.capacity
    eager, scheduled = pinned
    if auto.strategy == eager.strategy == scheduled.strategy:
        # The simpler program wins where the other one gains next to nothing.
        gains = scheduled.step_s < (1 - LEAST_GAIN) * eager.step_s
        assert auto.mode == ("scheduled" if gains else "eager")


def test_a_note_names_the_step_in_the_other_mode() -> None:
    plan, asked = (planned("llama", mode, 1e7, True) for mode in ("auto", "scheduled"))
    (note,) = [note for note in plan.notes if note.startswith(f"mode {plan.mode}: ")]
    assert "in mode eager" in note or "in mode scheduled" in note or "no other order" in note
    assert not any(note.startswith("mode") for note in asked.notes)


def test_what_communicates_nowhere_inside_is_not_scheduled() -> None:
    options = CompileOptions(pins={"dp": 4, "zero": 3, "microbatches": 1})
    plan = plan_captured(captured_family("llama"), "llama", cluster(), options)
    assert plan.mode == "eager" and not any(note.startswith("mode") for note in plan.notes)


def test_a_pipeline_is_held_against_buckets_of_one_pass() -> None:
    """Without buckets this model is slower in one pass than in two microbatches."""
    spec = resolve_cluster("local-cpu", 2)
    steps_s = [
        plan_captured(captured_family("vit"), "vit", spec, CompileOptions(pins=pins)).step_s
        for pins in ({"dp": 2}, {"dp": 2, "microbatches": 1}, {"dp": 2, "microbatches": 2})
    ]
    assert steps_s[0] <= min(steps_s[1:]) / (1 - LEAST_GAIN)
    assert steps_s[1] < steps_s[2]


def test_stages_run_eager() -> None:
    options = CompileOptions(pins={"pp": 2, "tp": 2, "microbatches": 2})
    assert plan_captured(captured_family("llama"), "llama", cluster(), options).mode == "eager"


def test_micro_chunks_ask_for_mode_scheduled() -> None:
    options = CompileOptions(pins={**TP, "micro_chunks": 2})
    plan = plan_captured(captured_family("llama"), "llama", cluster(), options)
    assert plan.mode == "scheduled" and any(r.chunking.count == 2 for r in plan.regions)


def finalists(options: CompileOptions, bytes_per_s: float = 1e11) -> tuple[Plan, ...]:
    graph, batch = captured_family("llama").graph, captured_family("llama").graph.batch_size
    assert batch
    return find_finalists(
        PlanRequest(
            graph, cluster(bytes_per_s), options, "llama", batch, OpProber(), wants_rivals=True
        )
    )


@pytest.mark.parametrize(
    "pins", [{}, {"reduce_bucket_bytes": "1GB", "allgather_bucket_bytes": "1GB"}]
)
def test_no_buckets_make_shards_move_faster(pins: Mapping[str, Any]) -> None:
    options = CompileOptions(pins={**ANY, "dp": 4, "zero": 3, **pins})
    (plan, *_) = finalists(options, 1e7)
    step = plan.simulated
    assert step is not None
    bound_s = least_step_s(step.compute_s, by_link_s(plan), plan.cluster.overlap_slowdown)
    found = fastest((plan,), captured_family("llama").graph, options).plan
    assert 2 * step.compute_s < bound_s <= found.step_s * (1 + 1e-9)


def test_a_rival_wins_where_it_is_faster_and_a_note_says_so() -> None:
    options = CompileOptions(pins=ANY, mode="eager")
    graph, (first, *others) = captured_family("llama").graph, finalists(options, 1e9)
    assert others
    alone = fastest((first,), graph, options)
    assert alone.finalist is first and alone.plan.step_s <= first.step_s
    slower = max(others, key=lambda plan: plan.step_s)
    assert fastest((slower,), graph, options).plan.step_s > alone.plan.step_s / (1 - LEAST_GAIN)
    won = fastest((slower, first), graph, options)
    assert won.finalist is first and won.plan.step_s == alone.plan.step_s
    assert won.plan.notes[-1].startswith(f"{slower.strategy.label} was ahead as the search")


def test_a_pin_that_no_finalist_keeps_is_refused() -> None:
    with pytest.raises(OptionError, match="collective_matmul=1"):
        options = CompileOptions(pins={"dp": 4, "microbatches": 1, "collective_matmul": 1})
        plan_captured(captured_family("llama"), "llama", cluster(), options)
