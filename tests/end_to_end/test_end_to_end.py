"""Unmodified models on gloo processes: loss and every gradient equal those of one process.

Six families x {dp, zero2, zero3, tp, tp+sp, cp} on 2 processes and pairs of them on 4, two mixtures
of experts x {ep, dp x ep, zero3 x ep, ep x tp, ep x tp+sp} on 4, in float64,
weights copied from the original, ignored labels and tied weights on. A loss that agrees proves
little by itself; the gradients are held one by one.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.hugging_face import families, tiny_model
from support.processes.pool import Pools
from support.programs.emit import clipped_steps

import meshfold
from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.ir.plan import Plan
from meshfold.plan_file.io import plan_to_json
from meshfold.validation.float64_mode import float64_everywhere

pytestmark = pytest.mark.multiprocess

EXACT = 1e-12

PINS = {
    "dp": (2, {"dp": 2, "tp": 1, "zero": 0}),
    "zero2": (2, {"dp": 2, "tp": 1, "zero": 2}),
    "zero3": (2, {"dp": 2, "tp": 1, "zero": 3}),
    "tp": (2, {"dp": 1, "tp": 2, "sp": 0}),
    "tp+sp": (2, {"dp": 1, "tp": 2, "sp": 1}),
    "dp x tp": (4, {"dp": 2, "tp": 2, "zero": 0, "sp": 0}),
    "zero3 x tp+sp": (4, {"dp": 2, "tp": 2, "zero": 3, "sp": 1}),
}
"""(processes, pins) by name of the strategy."""

UNEVEN_PINS = {
    "zero3 of four": (4, {"dp": 4, "tp": 1, "zero": 3}),
    "tp of four": (4, {"dp": 1, "tp": 4, "sp": 0}),
    "tp+sp of four": (4, {"dp": 1, "tp": 4, "sp": 1}),
}
"""For a model with dims that four ranks do not divide."""

CONTEXT_PINS = {
    "cp": (2, {"dp": 1, "cp": 2, "tp": 1, "zero": 0}),
    "zero3 over cp": (2, {"dp": 1, "cp": 2, "tp": 1, "zero": 3}),
    "zero3 x cp": (4, {"dp": 2, "cp": 2, "tp": 1, "zero": 3}),
    "cp x tp": (4, {"dp": 1, "cp": 2, "tp": 2, "zero": 0, "sp": 0}),
    "cp x tp+sp": (4, {"dp": 1, "cp": 2, "tp": 2, "zero": 3, "sp": 1}),
}
"""The same where cp cuts the sequence."""

EXPERT_PINS = {
    "ep": (4, {"dp": 1, "ep": 4, "tp": 1, "zero": 0}),
    "dp x ep": (4, {"dp": 2, "ep": 2, "tp": 1, "zero": 0}),
    "ep x tp": (4, {"dp": 1, "ep": 2, "tp": 2, "zero": 0, "sp": 0}),
    "ep x tp+sp": (4, {"dp": 1, "ep": 2, "tp": 2, "zero": 3, "sp": 1}),
    "zero3 x ep": (4, {"dp": 2, "ep": 2, "tp": 1, "zero": 3}),
    "zero3 x ep x cp": (4, {"dp": 1, "ep": 2, "cp": 2, "tp": 1, "zero": 3}),
}
"""The same where tokens travel to their experts."""

ALL_PINS = PINS | UNEVEN_PINS | CONTEXT_PINS | EXPERT_PINS


@cache
def captured_family(family: str) -> Captured:
    model, batch = tiny_model(family)
    with float64_everywhere():
        return capture(model, batch)


SMALL_TABLES = {
    "odd_gpt2": ("*wte.weight", "tp:0"),
    "odd_gemma2": ("*embed_tokens.weight", "tp:0"),
    "three_gpt2": ("*c_attn.weight", "tp:1+"),
    "three_llama": ("*q_proj.weight", "tp:0+"),
    "three_vit": ("*q_proj.weight", "tp:0+"),
    "three_t5": ("*SelfAttention.q.weight", "tp:0+"),
}
"""Families whose vocabulary or heads no axis divides: how a parameter is to be stored."""


def pins_for(family: str, strategy: str) -> tuple[int, dict[str, Any]]:
    """(processes, pins). Tables as small as those of tests would be cut along their columns, and
    attention along its rows."""
    num_processes, pins = ALL_PINS[strategy]
    if family not in SMALL_TABLES:
        return num_processes, pins
    name, stored = SMALL_TABLES[family]
    zero = ",dp" if pins.get("zero") else ""
    return num_processes, {**pins, f"layout:{name}": stored + zero}


@cache
def plan_for(family: str, strategy: str) -> Plan:
    num_processes, pins = pins_for(family, strategy)
    cluster = resolve_cluster("local-cpu", num_processes)
    options = meshfold.CompileOptions(pins=pins)
    return plan_captured(captured_family(family), family, cluster, options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", families("llama"))
@pytest.mark.parametrize("strategy", PINS)
def test_loss_and_every_gradient_equal_one_process(
    pools: Pools, family: str, strategy: str
) -> None:
    check_step(pools, family, strategy)


def test_padded_parameters_equal_one_process(pools: Pools) -> None:
    plan = plan_for("uneven", "zero3 of four")
    stored = [p.stored for region in plan.regions for p in region.parameters]
    assert all(layout[0].padded for layout in stored)
    check_step(pools, "uneven", "zero3 of four")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param("odd_gpt2", "tp+sp", marks=pytest.mark.slow),
        ("odd_gpt2", "zero3 x tp+sp"),
        pytest.param("odd_gpt2", "dp x tp", marks=pytest.mark.slow),
        pytest.param("odd_gpt2", "cp x tp+sp", marks=pytest.mark.slow),
        pytest.param("odd_gemma2", "tp", marks=pytest.mark.slow),
        pytest.param("odd_gemma2", "zero3 x tp+sp", marks=pytest.mark.slow),
    ],
)
def test_an_odd_vocabulary_is_shared_over_tp(pools: Pools, family: str, strategy: str) -> None:
    plan = plan_for(family, strategy)
    tables = [p for region in plan.regions for p in region.parameters if p.shape[0] == 67]
    assert len(tables) == 2  # read by the embedding and by the head
    axis = plan.mesh.index("tp")
    assert all(str(p.stored[axis]) == str(p.used[axis]) == "S0+" for p in tables)
    check_step(pools, family, strategy)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("three_gpt2", "tp"),
        pytest.param("three_gpt2", "tp of four", marks=pytest.mark.slow),
        pytest.param("three_gpt2", "zero3 x tp+sp", marks=pytest.mark.slow),
        ("three_llama", "tp+sp of four"),
        pytest.param("three_llama", "tp", marks=pytest.mark.slow),
        pytest.param("three_llama", "zero3 x tp+sp", marks=pytest.mark.slow),
        pytest.param("three_llama", "cp x tp+sp", marks=pytest.mark.slow),
        pytest.param("three_vit", "tp", marks=pytest.mark.slow),
        pytest.param("three_vit", "zero3 x tp+sp", marks=pytest.mark.slow),
        pytest.param("three_t5", "tp", marks=pytest.mark.slow),
        pytest.param("three_t5", "tp of four", marks=pytest.mark.slow),
    ],
)
def test_heads_that_do_not_divide_are_shared_over_tp(
    pools: Pools, family: str, strategy: str
) -> None:
    """Two ranks have two heads and one, four have one each and none."""
    plan = plan_for(family, strategy)
    axis = plan.mesh.index("tp")
    padded = [p.name for region in plan.regions for p in region.parameters if p.stored[axis].padded]
    assert len(padded) >= 2
    check_step(pools, family, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["odd_gpt2", "three_gpt2", "three_llama"])
def test_what_tp_pads_trains_and_loads_elsewhere(pools: Pools, family: str, tmp_path: Path) -> None:
    expected = losses_of_one_process(family)
    _, pins = pins_for(family, "zero3 x tp+sp")
    for losses in pools.run(
        4, "support.programs.emit:train_steps", family, pins, 3, is_local=False
    ):
        assert losses == pytest.approx(expected, abs=EXACT)
    plans = [plan_to_json(plan_for(family, s)) for s in ("zero3 x tp+sp", "dp x tp")]
    captured = captured_family(family)
    found = pools.run(
        4, "support.programs.emit:save_and_load", family, captured, *plans, str(tmp_path)
    )
    assert all(wrong == [] for wrong in found)


@pytest.mark.slow
def test_clipping_counts_no_padding_of_heads(pools: Pools) -> None:
    num_processes, pins = pins_for("three_gpt2", "tp of four")
    expected = clipped_steps("three_gpt2", {}, 0.3)
    for found in pools.run(
        num_processes, "support.programs.emit:clipped_steps", "three_gpt2", pins, 0.3
    ):
        assert np.array(found) == pytest.approx(np.array(expected), abs=EXACT)


@pytest.mark.slow
def test_padded_parameters_train_and_load_elsewhere(pools: Pools, tmp_path: Path) -> None:
    _, pins = UNEVEN_PINS["zero3 of four"]
    expected = losses_of_one_process("uneven")
    for losses in pools.run(
        4, "support.programs.emit:train_steps", "uneven", pins, 3, is_local=False
    ):
        assert losses == pytest.approx(expected, abs=EXACT)
    plans = [plan_to_json(plan_for("uneven", s)) for s in ("zero3 of four", "dp x tp")]
    captured = captured_family("uneven")
    for k, (first, second) in enumerate((plans, plans[::-1])):
        found = pools.run(
            4,
            "support.programs.emit:save_and_load",
            "uneven",
            captured,
            first,
            second,
            str(tmp_path / str(k)),
        )
        assert all(wrong == [] for wrong in found)


# T5 of two layers is one region, which carries no sequence to another.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", families(without=("t5",)))
@pytest.mark.parametrize("strategy", CONTEXT_PINS)
def test_with_the_sequence_sharded_loss_and_every_gradient_equal_one_process(
    pools: Pools, family: str, strategy: str
) -> None:
    check_step(pools, family, strategy)


@pytest.mark.slow
@pytest.mark.rotated(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("strategy", EXPERT_PINS)
def test_with_experts_shared_loss_and_every_gradient_equal_one_process(
    pools: Pools, family: str, strategy: str
) -> None:
    check_step(pools, family, strategy)


def check_step(pools: Pools, family: str, strategy: str) -> None:
    """One step of the pinned plan against one process."""
    num_processes, pins = ALL_PINS[strategy]
    plan = plan_for(family, strategy)
    chosen = plan.strategy
    assert chosen.degrees == (pins["dp"], pins.get("cp", 1), pins["tp"], pins.get("ep", 1), 0)
    assert chosen.zero == pins.get("zero", 0) and chosen.sequence_parallel == bool(pins.get("sp"))
    results = pools.run(
        num_processes,
        "support.programs.emit:compare_step",
        family,
        captured_family(family),
        plan_to_json(plan),
    )
    for loss_error, gradient_error, name, uneven in results:
        assert loss_error <= EXACT
        assert gradient_error <= EXACT, name
        assert not uneven, "parameters with a gradient on one side only"


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gpt2", "zero3 x tp+sp"),
        ("mixtral", "tp+sp"),
        pytest.param("t5", "zero3", marks=pytest.mark.slow),
    ],
)
def test_recomputed_regions_equal_one_process(pools: Pools, family: str, strategy: str) -> None:
    plan = plan_for(family, strategy)
    regions = [replace(r, typing=replace(r.typing, recompute="full")) for r in plan.regions]
    results = pools.run(
        PINS[strategy][0],
        "support.programs.emit:compare_step",
        family,
        captured_family(family),
        plan_to_json(replace(plan, regions=tuple(regions))),
    )
    for loss_error, gradient_error, name, uneven in results:
        assert loss_error <= EXACT
        assert gradient_error <= EXACT, name
        assert not uneven, "parameters with a gradient on one side only"


def losses_of_one_process(family: str) -> list[float]:
    """Of three steps of AdamW, each before the step."""
    model, batch = tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        with float64_everywhere():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    return expected


@pytest.mark.parametrize(
    ("strategy", "is_local"),
    [("zero3 x tp+sp", False), pytest.param("dp x tp", True, marks=pytest.mark.slow)],
    ids=str,
)
def test_three_adamw_steps_equal_one_process(pools: Pools, strategy: str, is_local: bool) -> None:
    """Through meshfold.compile, search and initial weights included, in an ordinary loop."""
    num_processes, pins = PINS[strategy]
    results = pools.run(
        num_processes, "support.programs.emit:train_steps", "llama", pins, 3, is_local=is_local
    )
    expected = losses_of_one_process("llama")
    assert expected[2] < expected[0] - 0.1
    for losses in results:
        assert losses == pytest.approx(expected, abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "zero3 x tp+sp"])
def test_clipping_is_by_the_norm_of_the_whole_model(pools: Pools, strategy: str) -> None:
    num_processes, pins = PINS[strategy]
    expected = clipped_steps("gpt2", {}, 0.3)
    assert all(norm > 0.6 for _, norm in expected), "nothing would be clipped"
    for found in pools.run(num_processes, "support.programs.emit:clipped_steps", "gpt2", pins, 0.3):
        assert np.array(found) == pytest.approx(np.array(expected), abs=EXACT)


@pytest.mark.parametrize("strategy", [pytest.param("dp", marks=pytest.mark.slow), "zero3"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pools: Pools, strategy: str) -> None:
    num_processes, pins = PINS[strategy]
    for found in pools.run(num_processes, "support.programs.emit:scaled_steps", pins):
        assert found == [(1024.0, True), (512.0, False), (512.0, True)]


def test_dropout_gives_every_plan_the_same_mask(pools: Pools) -> None:
    losses = [
        *pools.run(2, "support.programs.emit:dropout_losses", {"dp": 2}, 2),
        *pools.run(2, "support.programs.emit:dropout_losses", {"tp": 2, "sp": 0}, 2),
        *pools.run(4, "support.programs.emit:dropout_losses", {"dp": 2, "tp": 2, "zero": 3}, 2),
    ]
    first = losses[0]
    assert first[0] != pytest.approx(first[1]), "every step draws anew"
    for other in losses[1:]:
        assert other == pytest.approx(first, abs=EXACT)


@pytest.mark.parametrize(
    ("family", "saved_under"),
    [
        ("gpt2", "zero3 x tp+sp"),
        ("llama", "zero3 x tp+sp"),
        pytest.param("mixtral", "zero3 x ep", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_under_another_plan(
    pools: Pools, family: str, saved_under: str, tmp_path: Path
) -> None:
    """GPT-2 stores its fused qkv in blocks, which DTensor cannot say."""
    plans = [plan_to_json(plan_for(family, s)) for s in (saved_under, "dp x tp")]
    captured = captured_family(family)
    for wrong in pools.run(
        4, "support.programs.emit:save_and_load", family, captured, *plans, str(tmp_path)
    ):
        assert wrong == []
