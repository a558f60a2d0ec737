"""The bubble in closed form, against the simulation of any division into stages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.makespans import makespan_s

from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.pipeline.bubble_bounds import (
    bubble_factor,
    hop_link,
    hop_s,
    split_bubble_factor,
)
from meshfold.cost_models.pipeline.makespan import StageTimes
from meshfold.cost_models.pipeline.schedules import Schedule, ScheduleKind

SECONDS = st.floats(0.01, 10.0)


@given(
    pairs=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=7),
    microbatches=st.integers(1, 20),
    extra=st.integers(0, 6),
)
def test_no_division_is_faster(pairs, microbatches, extra):
    p = len(pairs)
    extra = min(extra, p - 1)
    forward, backward = np.array(pairs).T
    schedule = Schedule(ScheduleKind.ONE_F_ONE_B, p, microbatches, extra_warm_up=extra)
    step_s = makespan_s(schedule, StageTimes.build(forward, backward))
    total_s = forward.sum() + backward.sum()
    assert bubble_factor(p, microbatches, extra) * total_s <= step_s * (1 + 1e-9)
    assert bubble_factor(p, microbatches, p - 1) <= bubble_factor(p, microbatches, extra) + 1e-12


@given(
    stages=st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=7),
    microbatches=st.integers(1, 20),
    extra=st.integers(0, 6),
)
def test_no_division_with_split_backward_is_faster(stages, microbatches, extra):
    p = len(stages)
    schedule = Schedule(ScheduleKind.ZERO_BUBBLE, p, microbatches, extra_warm_up=min(extra, p - 1))
    forward, inputs, weights = np.array(stages).T
    times = StageTimes.build(forward, inputs + weights, weight_s=weights)
    share = float((forward / times.total_s).min())
    bound_s = split_bubble_factor(p, microbatches, share) * times.total_s.sum()
    assert bound_s <= makespan_s(schedule, times) * (1 + 1e-9)
    assert bound_s >= times.total_s.sum() * microbatches / p * (1 - 1e-9)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 5), (8, 9), (8, 96)])
def test_even_stages_reach_it_above_p_microbatches(p, m):
    assert bubble_factor(p, m) == pytest.approx((m + p - 1) / p)


def test_hops_cross_the_network_between_nodes():
    spec = cluster("dgx-a100-80x4")
    outside = hop_link(spec, build_mesh(spec, dp=1, tp=8, pp=4))
    inside = hop_link(spec, build_mesh(spec, dp=1, tp=1, pp=8))
    assert outside == spec.network and inside == spec.groups[0].link
    assert hop_s(0, outside) == 0.0
    alone_s = outside.start_s + outside.latency_s + 1e9 / outside.bytes_per_s
    assert hop_s(10**9, outside) >= alone_s > hop_s(10**9, inside)
