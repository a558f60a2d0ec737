"""The passes of one microbatch, simulated apart."""

from dataclasses import replace

import pytest

from meshfold.cost_models.simulation.passes import simulate_passes
from meshfold.cost_models.simulation.step import simulate
from meshfold.ir.step_events import (
    CollectiveEvent,
    Event,
    ParameterGroupEvents,
    RegionEvents,
    StepEvents,
)

GATHER = CollectiveEvent("all_gather", ("dp",), "network", 100, 2.0)
SCATTER = CollectiveEvent("reduce_scatter", ("dp",), "network", 100, 3.0)
GROUP = ParameterGroupEvents(
    GATHER, SCATTER, unsharded_bytes=100, flat_bytes=200, result_bytes=50, saved=True
)
LAYER = RegionEvents(
    "B",
    forward=(Event("unshard", number=0), Event("forward_prefetch"), Event("compute", 4.0)),
    backward=(Event("pre_backward"), Event("compute", 5.0), Event("reduce", number=0)),
    groups=(GROUP,),
)
TWO = StepEvents((LAYER,), (0, 0), (), 1.0, (0,) * 5, fixed_bytes=0, slowdown=1.0)


def test_the_passes_of_two_layers_by_hand() -> None:
    forward, backward = simulate_passes(TWO)
    # G0 0 to 2, exposed; F0 2 to 6 over G1; F1 6 to 10.
    assert (forward.compute_s, forward.exposed_s, forward.seconds) == (8.0, 2.0, 10.0)
    # G1 again 10 to 12, since other passes may have come between; B1 12 to 17 over G0; S1 17 to 20
    # over B0, which ends at 22 and sends; S0 22 to 25.
    assert (backward.compute_s, backward.exposed_s, backward.tail_s) == (10.0, 5.0, 3.0)
    kinds = [t.collective.kind for t in backward.transfers]
    assert kinds == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]


def test_the_update_is_no_part_of_a_pass() -> None:
    kept = replace(TWO, regions=(replace(LAYER, reshard_after_forward=False),), slowdown=1.25)
    passes = simulate_passes(kept)
    whole = simulate(kept).step
    assert sum(p.seconds for p in passes) == pytest.approx(whole.step_s - 1.0)
    assert sum(p.contention_s for p in passes) == pytest.approx(whole.contention_s)
