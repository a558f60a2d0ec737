"""Optimizers in plans: what they keep, which plans they can have, in how many bits states are."""

import math
from functools import cache

import pytest
from support.processes.offload import cluster_with_hosts
from support.programs.local_programs import stack_model

from meshfold.capture.pipeline import capture
from meshfold.errors import InfeasibleError, OptionError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.optimizers import OPTIMIZERS
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.report.step_time import precision_text

PROBER = OpProber()
WIDTH, BATCH = 64, 4


@cache
def graph() -> FoldedGraph:
    model, batch = stack_model(4, WIDTH, BATCH)
    return capture(model, batch).graph


def plan(num_devices: int = 1, prices_memory: bool = False, **options) -> Plan:
    return find_plan_for(
        graph(),
        cluster_with_hosts(num_devices),
        CompileOptions(**options),
        model_name="stack",
        batch_size=BATCH,
        probe=PROBER,
        prices_memory=prices_memory,
    )


def kept_by_hand(optimizer: str) -> int:
    """Of a float64 model on one device."""
    shapes = [p.shape for p in graph().parameters]
    numel, blocks = (sum(f(math.prod(s)) for s in shapes) for f in (int, lambda n: -(-n // 256)))
    matrices = sum(math.prod(s) for s in shapes if len(s) == 2)
    factors = sum(sum(s) if len(s) == 2 else s[0] for s in shapes)
    return {
        "sgd": 0,
        "momentum": 8 * numel,
        "adamw": 16 * numel,
        "adamw_fused": 16 * numel,
        "adamw_bf16": 4 * numel,
        "adamw_8bit": 2 * numel + 8 * blocks,
        "adafactor": 8 * factors,
        "muon": 16 * numel - 8 * matrices,
    }[optimizer]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plan_has_the_states_of_its_optimizer(optimizer: str) -> None:
    found = plan(optimizer=optimizer, pins={"microbatches": 1})
    assert found.memory.optimizer == kept_by_hand(optimizer)
    loaded = plan_from_json(plan_to_json(found))
    assert loaded.optimizer == optimizer
    priced = price_plan(graph(), loaded, PROBER)
    assert (priced.time, priced.memory) == (found.time, found.memory)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_bf16", "adafactor"])
def test_a_plan_with_microbatches_has_them(optimizer: str) -> None:
    found = plan(optimizer=optimizer, pins={"microbatches": 2})
    assert found.strategy.microbatches == 2
    assert found.memory.optimizer == kept_by_hand(optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_zero_shards_states(optimizer: str) -> None:
    found = plan(2, optimizer=optimizer, pins={"dp": 2, "zero": 3})
    assert found.memory.optimizer == pytest.approx(kept_by_hand(optimizer) / 2, rel=0.01)
    host = plan(2, optimizer=optimizer, pins={"dp": 2, "zero": 3, "offload": "optimizer"})
    assert host.memory.optimizer == 0
    assert any("optimizer states of" in note for note in host.notes)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_of_whole_parameters_have_them_on_every_rank(optimizer: str) -> None:
    found = plan(2, optimizer=optimizer)
    strategy = found.strategy
    assert (strategy.tp, strategy.zero, strategy.pp, strategy.ep) == (1, 0, 1, 1)
    stored = {t.kind for r in found.regions for p in r.parameters for t in p.stored}
    assert stored <= {"I", "R"}
    for pin in ({"zero": 3}, {"tp": 2}, {"pp": 2}, {"layout:*": "dp"}):
        with pytest.raises(OptionError, match=f"optimizer {optimizer} looks at whole parameters"):
            CompileOptions(optimizer=optimizer, pins=pin)


def test_a_pin_of_states_is_kept() -> None:
    for states, optimizer in (("full", "adamw"), ("bf16", "adamw_bf16"), ("int8", "adamw_8bit")):
        found = plan(pins={"states": states})
        assert found.optimizer == optimizer and found.pins["states"] == states
    with pytest.raises(OptionError, match="pin states=fp4: unknown; write full or bf16 or int8"):
        CompileOptions(pins={"states": "fp4"})
    with pytest.raises(OptionError, match="pin states=int8: optimizer sgd has no such states"):
        CompileOptions(pins={"states": "int8"}, optimizer="sgd")


def test_nothing_has_fewer_bits_that_was_not_allowed_to_or_need_not() -> None:
    whole = plan()
    assert plan(allow_low_precision_states=True).optimizer == whole.optimizer == "adamw"
    # One device cannot shard: what is allowed makes the difference.
    tight = plan(optimizer="adamw_8bit", pins={"offload": "none"}).memory.peak
    asked = {"memory_bytes": tight + 64, "pins": {"offload": "none", "chunked_loss": 0}}
    with pytest.raises(InfeasibleError) as whole_states:
        plan(**asked)
    # What nothing fits in says what the smallest states need.
    with pytest.raises(InfeasibleError) as smallest:
        plan(**{**asked, "memory_bytes": 1024}, allow_low_precision_states=True)
    assert smallest.value.required_bytes < whole_states.value.required_bytes
    found = plan(**asked, allow_low_precision_states=True)
    assert found.optimizer == "adamw_8bit" and found.memory.fits
    assert "Adam's states in 8 bits" in precision_text(found)


def test_the_price_of_fewer_bits_is_named() -> None:
    tight = plan(optimizer="adamw_8bit", pins={"offload": "none"}).memory.peak
    found = plan(
        memory_bytes=tight + 64,
        pins={"offload": "none"},
        allow_low_precision_states=True,
        prices_memory=True,
    )
    (note,) = [note for note in found.notes if note.startswith("fits because")]
    assert "optimizer states in 8 bits" in note
