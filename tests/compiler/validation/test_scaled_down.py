"""Plans for more than this machine takes: what the scaled-down ones keep, and say."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes.pool import Pools

from meshfold.api import plan_captured
from meshfold.capture.pipeline import Captured, capture
from meshfold.cli.main import run
from meshfold.errors import MeshfoldError
from meshfold.ir.options import CompileOptions, PinValue
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import UniformStrategy
from meshfold.models.from_argument import build_for_plan, build_model
from meshfold.passes.fold.assemble import fingerprint
from meshfold.plan_file.io import plan_to_json
from meshfold.validation import scaled_down as scaled_down_module
from meshfold.validation.scaled_down import (
    ScaledDown,
    _small_degrees,
    needs_scaling_down,
    scaled_down,
)
from meshfold.validation.verify import _report

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
TINY = str(CONFIGS / "llama-tiny.json")
FACTORY = "support.models.factories:regression"


def planned(
    model: str, num_devices: int, pins: Mapping[str, PinValue], batch: int
) -> tuple[Plan, Captured]:
    built = build_model(model, batch=batch)
    captured = capture(built.model, built.example_inputs)
    options = CompileOptions(pins=pins, optimizer="sgd", seed=3)
    cluster = f"local-cpux{num_devices}"
    return plan_captured(captured, "Tiny", cluster, options), captured


def scaled_down_of(
    model: str, num_devices: int, pins: Mapping[str, PinValue], batch: int
) -> ScaledDown:
    plan, captured = planned(model, num_devices, pins, batch)
    assert needs_scaling_down(plan)
    small = scaled_down(plan, model, captured)
    # It can be built from what the scaled-down model names, and is what was planned.
    built = build_for_plan(small.model, small.plan)
    assert fingerprint(capture(built.model, built.example_inputs).graph) == (
        small.plan.model.fingerprint
    )
    return small


@pytest.mark.parametrize(
    ("num_devices", "pins", "batch", "strategy"),
    [
        (16, {"dp": 16, "tp": 1, "zero": 2}, 32, "dp2, zero2"),
        (16, {"dp": 4, "tp": 4, "zero": 3, "sp": 1}, 8, "dp2 x tp2+sp, zero3"),
        pytest.param(
            *(16, {"cp": 4, "tp": 4, "zero": 3}, 1, "cp2 x tp2, zero3"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(12, {"dp": 12, "zero": 3, "recompute": "full"}, 12, "dp2, zero3, recompute full"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            32,
            {"pp": 4, "dp": 2, "tp": 4, "microbatches": 8, "schedule": "1f1b", "zero": 3},
            16,
            "pp2 x dp2 x tp2, zero3, 4 microbatches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_kind_of_strategy_is_kept(
    num_devices: int, pins: Mapping[str, PinValue], batch: int, strategy: str
) -> None:
    small = scaled_down_of(TINY, num_devices, pins, batch)
    assert small.plan.strategy.label == strategy
    assert small.plan.world_size <= 8
    assert (small.plan.optimizer, small.plan.seed) == ("sgd", 3)
    if "schedule" in pins:
        assert small.plan.schedule.startswith("1f1b(2 x 4")


@pytest.mark.slow
def test_a_layout_that_was_pinned_is_kept_where_there_is_the_parameter() -> None:
    pins = {
        "dp": 4,
        "tp": 4,
        "layout:model.layers.*.mlp.up_proj.weight": "tp:0",
        "layout:lm_head.*": "replicate",
    }
    assert dict(scaled_down_of(TINY, 16, pins, 4).plan.pins).items() >= {
        ("layout:model.layers.*.mlp.up_proj.weight", "tp:0"),
        ("layout:lm_head.*", "replicate"),
    }


def test_what_became_smaller_is_said() -> None:
    small = scaled_down_of(TINY, 16, {"dp": 4, "tp": 4, "zero": 3, "sp": 0}, 8)
    assert small.changes[:4] == (
        "mesh dp4 x tp4 -> dp2 x tp2",
        "plan dp4 x tp4, zero3 -> dp2 x tp2, zero3",
        "inputs input_ids 8x32, labels 8x32 -> input_ids 4x16, labels 4x16",
        "hidden_size 64 -> 32",
    )


def test_a_factory_is_called_as_it_is() -> None:
    small = scaled_down_of(FACTORY, 16, {"dp": 16, "zero": 3}, 32)
    assert small.model == FACTORY
    assert small.changes == (
        "mesh dp16 -> dp2",
        "plan dp16, zero3 -> dp2, zero3",
        "inputs x 32x8, target 32x4 -> x 4x8, target 4x4",
    )


def test_a_factory_of_a_model_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, captured = planned(FACTORY, 16, {"dp": 16}, 16)
    monkeypatch.setattr(scaled_down_module, "_room_bytes", lambda: 1000)
    with pytest.raises(
        MeshfoldError,
        match=f"no scaled-down version of {FACTORY} for local processes: a factory's model "
        "cannot be shrunk, and this machine has no room for 416 parameters in float64 in every "
        "process; plan a smaller model",
    ):
        scaled_down(plan, FACTORY, captured)


def test_room_decides_for_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = planned(FACTORY, 2, {"dp": 2}, 8)
    assert not needs_scaling_down(plan)
    monkeypatch.setattr(scaled_down_module, "_room_bytes", lambda: 1000)
    assert needs_scaling_down(plan)


@pytest.mark.multiprocess
def test_the_scaled_down_of_a_factory_is_verified(pools: Pools) -> None:
    small = scaled_down_of(FACTORY, 16, {"tp": 16}, 8)
    results = pools.run(2, "support.processes.verify:compare", plan_to_json(small.plan), FACTORY)
    assert _report(small.plan, results).passed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_plan_for_a_cluster_is_verified_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(CONFIGS / "llama-3-8b.json")
    file = str(tmp_path / "plan.json")
    pins = ["--pin", "tp=8", "--pin", "sp=1", "--pin", "zero=3"]
    assert run(["plan", model, "--cluster", "dgx-h100x8", *pins, "-o", file]) == 0
    capsys.readouterr()
    assert run(["verify", file, "--model", model]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a scaled-down model and plan, not the real size: mesh dp8 x tp8 -> dp2 x tp2" in out
    assert "hidden_size 4096 -> 128" in out
    assert "agree to 1e-10, on a scaled-down model and plan" in out


def test_four_axes_are_too_many_for_two_ranks_on_each() -> None:
    plan, _ = planned(FACTORY, 2, {"dp": 2}, 8)
    strategy = UniformStrategy(dp=4, ep=4, cp=2, tp=8)
    assert _small_degrees(replace(plan, strategy=strategy)) == {
        "dp": 1,
        "cp": 2,
        "ep": 2,
        "tp": 2,
        "pp": 1,
    }
