"""Losses under plans that shard the batch, the classes, or both: loss and gradients are those of
one process, and no loss runs on unsharded values."""

import pytest
from support.processes.losses import LOSSES, ROWS, trained_model
from support.processes.pool import Pools

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for

EXACT = 1e-12
UNEVEN = {"similarity": r"rsub.Scalar \(.*losses.py:[0-9]+\) needs .* of all samples at once"}
"""What microbatches cannot add up, and what is said of it: something is done with the mean."""


def planned(loss: str, num_devices: int, pins: dict[str, int]) -> Plan:
    return find_plan_for(
        capture(*trained_model(loss)).graph,
        resolve_cluster("local-cpu", num_devices),
        CompileOptions(pins=pins),
        model_name=loss,
        batch_size=ROWS,
        probe=OpProber(),
    )


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2, "dp": 1}], ids=str)
def test_losses_of_two_processes_equal_those_of_one(pools: Pools, pins: dict[str, int]) -> None:
    for errors in pools.run(2, "support.processes.losses:largest_errors", list(LOSSES), pins):
        assert dict(zip(LOSSES, errors, strict=True)) == dict.fromkeys(
            LOSSES, pytest.approx(0.0, abs=EXACT)
        )


@pytest.mark.multiprocess
def test_losses_of_microbatches_add_up_to_that_of_the_batch(pools: Pools) -> None:
    losses = [loss for loss in LOSSES if loss not in UNEVEN]
    pins = {"dp": 2, "microbatches": 2}
    for errors in pools.run(2, "support.processes.losses:largest_errors", losses, pins):
        assert dict(zip(losses, errors, strict=True)) == dict.fromkeys(
            losses, pytest.approx(0.0, abs=EXACT)
        )


@pytest.mark.parametrize("loss", UNEVEN)
def test_losses_that_microbatches_cannot_add_up_are_refused(loss: str) -> None:
    with pytest.raises(OptionError, match=f"microbatches: .*{UNEVEN[loss]}"):
        planned(loss, 2, {"dp": 2, "microbatches": 2})


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_falls_back_to_unsharded_values(loss: str) -> None:
    plan = planned(loss, 2, {"dp": 2})
    assert [op for region in plan.regions for op in region.fallback_ops] == []
    moved = [c for region in plan.regions for c in region.conversions if c.kind == "activation"]
    assert [c.value for c in moved if "all_gather" in (*c.forward, *c.backward)] == []
