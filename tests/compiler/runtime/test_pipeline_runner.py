"""Pipelines against one process in float64: loss, gradients, parameters after three steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.processes.pool import Pools
from support.programs.pipeline import captured_model, planned, recut

import meshfold
from meshfold.cost_models.pipeline.schedules import V_ORDERS, Schedule, ScheduleKind
from meshfold.errors import OptionError
from meshfold.plan_file.io import plan_to_json
from meshfold.runtime.runner import ProgramRunner

TOLERANCE = 1e-12
MICROBATCHES = 4
LAYERS = {"t5": 3}
MESHES: dict[str, dict[str, Any]] = {
    "pp4": {"pp": 4},
    "pp2 x tp2": {"pp": 2, "tp": 2, "sp": 0},
    "pp2 x tp2+sp": {"pp": 2, "tp": 2, "sp": 1},
    "pp2 x dp2": {"pp": 2, "dp": 2, "zero": 0},
    "pp2 x dp2, zero3": {"pp": 2, "dp": 2, "zero": 3},
}
EXPERT_MESHES: dict[str, dict[str, Any]] = {
    "pp2 x ep2": {"pp": 2, "ep": 2, "zero": 0},
    "pp2 x ep2, zero3": {"pp": 2, "ep": 2, "zero": 3},
}
ZERO_MESHES: dict[str, dict[str, Any]] = {
    "pp2 x dp2, zero1": {"pp": 2, "dp": 2, "zero": 1},
    "pp2 x dp2, zero2": {"pp": 2, "dp": 2, "zero": 2},
}
CONTEXT_MESHES: dict[str, dict[str, Any]] = {
    "pp2 x cp2": {"pp": 2, "cp": 2, "zero": 0},
    "pp2 x cp2, zero3": {"pp": 2, "cp": 2, "zero": 3},
}
FAMILIES = ("gpt2", "llama", "t5", "vit", "mixtral")


def cases() -> list[Any]:
    """(family, mesh, which schedules): GPT-2 on pp4 under all, shared experts under half of them a
    mesh, of the others one of the first five each and one of the last three, so that every family
    and every one of MESHES meets every schedule."""
    found = [
        pytest.param("gpt2", "pp4", [4], id="gpt2-pp4"),
        pytest.param("gpt2", "pp4", [0, 1, 2, 3], marks=pytest.mark.slow, id="gpt2-pp4-others"),
        pytest.param("gpt2", "pp4", [5, 6, 7], marks=pytest.mark.slow, id="gpt2-pp4-split chunks"),
    ]
    for f, family in enumerate(FAMILIES):
        for k, mesh in enumerate(MESHES):
            chosen = [(f + k) % 5, 5 + (f + k) % 3]
            slow = pytest.param(family, mesh, chosen, marks=pytest.mark.slow, id=f"{family}-{mesh}")
            found += [slow] if (family, mesh) != ("gpt2", "pp4") else []
    for k, mesh in enumerate(EXPERT_MESHES):
        found.append(pytest.param("mixtral", mesh, range(k, 8, 2), marks=pytest.mark.slow))
    for f, family in enumerate(("gpt2", "llama", "t5")):
        for k, mesh in enumerate(ZERO_MESHES):
            chosen = [(f + 2 * k) % 5, (f + 2 * k + 1) % 5]
            found.append(pytest.param(family, mesh, chosen, marks=pytest.mark.slow))
    for mesh, chosen in zip(ZERO_MESHES, ([3, 6], [5, 7]), strict=True):
        found.append(
            pytest.param("gpt2", mesh, chosen, marks=pytest.mark.slow, id=f"several-{mesh}")
        )
    for f, family in enumerate(FAMILIES):
        for k, mesh in enumerate(CONTEXT_MESHES):
            chosen = [(f + 2 * k + 1) % 5]
            found.append(pytest.param(family, mesh, chosen, marks=pytest.mark.slow))
    return found


def pinned(pins: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    full = {"microbatches": MICROBATCHES, "recompute": "none", **pins}
    return tuple(sorted(full.items()))


def schedules(p: int) -> list[Schedule]:
    m = MICROBATCHES
    return [
        Schedule(ScheduleKind.GPIPE, p, m),
        Schedule(ScheduleKind.ONE_F_ONE_B, p, m),
        Schedule(ScheduleKind.ONE_F_ONE_B, p, m, extra_warm_up=p - 1),
        Schedule(ScheduleKind.INTERLEAVED, p, m, num_virtual_stages=2),
        Schedule(ScheduleKind.ZERO_BUBBLE, p, m),
        Schedule(ScheduleKind.INTERLEAVED_ZERO_BUBBLE, p, m, num_virtual_stages=2),
        *(Schedule(kind, p, m, num_virtual_stages=2) for kind in V_ORDERS),
    ]


@pytest.mark.multiprocess
@pytest.mark.rotated(2)
@pytest.mark.parametrize(("family", "mesh", "chosen"), cases())
def test_pipelines_compute_what_one_process_does(
    pools: Pools, family: str, mesh: str, chosen: Sequence[int]
) -> None:
    pins = (MESHES | EXPERT_MESHES | ZERO_MESHES | CONTEXT_MESHES)[mesh]
    wanted = [schedules(pins["pp"])[k] for k in chosen]
    check_schedules(pools, family, 4, pins, wanted)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "chosen"),
    [
        ({"pp": 2, "dp": 2, "tp": 2, "sp": 0, "zero": 3}, 1),
        ({"pp": 2, "dp": 2, "tp": 2, "sp": 1, "zero": 0}, 4),
    ],
    ids=["pp2 x dp2 x tp2, zero3", "pp2 x dp2 x tp2+sp"],
)
def test_three_axes_on_eight_processes(pools: Pools, pins: dict[str, Any], chosen: int) -> None:
    check_schedules(pools, "llama", 8, pins, [schedules(2)[chosen]])


def check_schedules(
    pools: Pools, family: str, num_ranks: int, pins: dict[str, Any], wanted: Sequence[Schedule]
) -> None:
    """Three steps under each schedule: loss, gradients and parameters are those of one process."""
    layers = LAYERS.get(family, 6)
    base = planned(family, layers, num_ranks, pinned(pins))
    texts = [plan_to_json(recut(base, schedule)) for schedule in wanted]
    captured = captured_model(family, layers)
    arguments = (family, layers, captured, texts)
    # Five schedules, three steps each: long on a machine that does something else, too.
    results = pools.run(
        num_ranks, "support.programs.pipeline:run_pipelines", *arguments, timeout_s=600.0
    )
    for n, schedule in enumerate(wanted):
        ranks = [outcomes[n] for outcomes in results]
        assert len({r.loss for r in ranks}) == 1, schedule
        for r in ranks:
            assert r.loss_error < TOLERANCE, schedule
            assert r.gradient_error < TOLERANCE, schedule
            assert r.parameter_error < 1e-11, schedule
        step = num_ranks // schedule.num_devices
        assert tuple(r.in_flight for r in ranks[::step]) == schedule.in_flight
        # What several stages hold stays the same to the bit.
        for shard in range(step):
            seen: dict[str, str] = {}
            for r in ranks[shard::step]:
                for name, digest in r.digests.items():
                    assert seen.setdefault(name, digest) == digest, (schedule, name)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_ranks_may_give_their_own_part_of_the_batch(pools: Pools) -> None:
    """T5 needs its labels whole; GPT-2 is given some inputs whole, some in part."""
    for family, local in (
        ("llama", ["input_ids", "labels"]),
        ("gpt2", ["input_ids"]),
        ("t5", ["input_ids"]),
    ):
        layers = LAYERS.get(family, 6)
        base = planned(family, layers, 4, pinned(MESHES["pp2 x dp2"]))
        texts = [plan_to_json(recut(base, schedules(2)[1]))]
        captured = captured_model(family, layers)
        arguments = (family, layers, captured, texts, local)
        for (outcome,) in pools.run(4, "support.programs.pipeline:run_pipelines", *arguments):
            assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
def test_seven_layers_on_three_stages(pools: Pools) -> None:
    base = planned("llama", 7, 3, pinned({"pp": 3}))
    plan = recut(base, Schedule(ScheduleKind.ONE_F_ONE_B, 3, MICROBATCHES), [0, 3, 6])
    arguments = ("llama", 7, captured_model("llama", 7), [plan_to_json(plan)])
    for (outcome,) in pools.run(3, "support.programs.pipeline:run_pipelines", *arguments):
        assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
def test_uneven_stages_that_the_search_chose(pools: Pools) -> None:
    """Seven layers, an embedding that weighs and a head that works more than all of them."""
    plan = planned("heavy_ends", 7, 3, pinned({"pp": 3}), start_up=False)
    first, middle, last = (sum(run.count for run in stage.runs) for stage in plan.stages)
    assert max(first, last) < 3 < middle
    arguments = ("heavy_ends", 7, captured_model("heavy_ends", 7), [plan_to_json(plan)])
    for (outcome,) in pools.run(3, "support.programs.pipeline:run_pipelines", *arguments):
        assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_alone_in_their_buckets(pools: Pools, zero: int) -> None:
    """As all are where collectives take no time to start."""
    plan = planned("llama", 6, 4, pinned({"pp": 2, "dp": 2, "zero": zero}), start_up=False)
    arguments = ("llama", 6, captured_model("llama", 6), [plan_to_json(plan)])
    for (outcome,) in pools.run(4, "support.programs.pipeline:run_pipelines", *arguments):
        assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.slow
def test_gradients_of_one_device_add_up_over_microbatches(pools: Pools) -> None:
    base = planned("gpt2", 2, 1, pinned({}))
    assert base.schedule == "1f1b(1 x 4)"
    arguments = ("gpt2", 2, captured_model("gpt2", 2), [plan_to_json(base)])
    ((outcome,),) = pools.run(1, "support.programs.pipeline:run_pipelines", *arguments)
    assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE
    assert outcome.in_flight == 1


@pytest.mark.multiprocess
@pytest.mark.slow
def test_zero_gathers_and_reduces_as_often_as_it_says(pools: Pools) -> None:
    """And needs no more memory than planned. sgd: what it makes is not in a step of the model."""
    kind = Schedule(ScheduleKind.ONE_F_ONE_B, 2, MICROBATCHES)
    plans = [
        recut(planned("llama", 6, 4, pinned({"pp": 2, "dp": 2, "zero": zero}), "sgd"), kind)
        for zero in range(4)
    ]
    arguments = ("llama", 6, captured_model("llama", 6), [plan_to_json(plan) for plan in plans])
    for once, zero1, zero2, zero3 in pools.run(
        4, "support.programs.pipeline:count_collectives", *arguments
    ):
        num_buckets = zero1["all_gather"]
        assert num_buckets and not once["all_gather"] and not once["reduce_scatter"]
        assert zero1["reduce_scatter"] == zero2["all_gather"] == num_buckets
        assert zero2["reduce_scatter"] == zero3["reduce_scatter"] == MICROBATCHES * num_buckets
        assert MICROBATCHES * num_buckets < zero3["all_gather"] <= 2 * MICROBATCHES * num_buckets


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_memory_of_a_step_with_zero(pools: Pools, zero: int) -> None:
    """The device that needs most: at most what is predicted, and not much less. On a tiny model the
    optimizer and buffers of one layer weigh more than in any real one."""
    pins = {"pp": 2, "dp": 2, "zero": zero, "schedule": "gpipe"}
    plan = planned("llama", 6, 4, pinned(pins), "sgd")
    arguments = ("llama", 6, captured_model("llama", 6), plan_to_json(plan))
    counted = max(pools.run(4, "support.programs.pipeline:peak_bytes", *arguments))
    predicted = plan.memory.peak - plan.memory.parameters - plan.memory.reserve
    assert 0.75 * predicted < counted <= predicted


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_regions_that_run_again_in_a_pipeline(pools: Pools, recompute: str) -> None:
    pins = {"pp": 2, "dp": 2, "zero": 3, "recompute": recompute}
    base = planned("gpt2", 6, 4, pinned(pins))
    arguments = ("gpt2", 6, captured_model("gpt2", 6), [plan_to_json(base)])
    for (outcome,) in pools.run(4, "support.programs.pipeline:run_pipelines", *arguments):
        assert max(outcome.loss_error, outcome.gradient_error) < TOLERANCE


DROPOUT_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 microbatches": (1, {"microbatches": 2}),
    "4 microbatches, recompute full": (1, {"microbatches": 4, "recompute": "full"}),
    "pp2": (2, {"pp": 2, "microbatches": 4}),
    "pp2, recompute selective": (2, {"pp": 2, "microbatches": 4, "recompute": "selective"}),
    "2 microbatches x dp2": (2, {"dp": 2, "microbatches": 2}),
    "2 microbatches x tp2": (2, {"tp": 2, "microbatches": 2}),
    "pp2 x dp2": (4, {"pp": 2, "dp": 2, "microbatches": 2}),
}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", DROPOUT_PLANS)
def test_dropout_draws_alike_whatever_the_plan(pools: Pools, name: str) -> None:
    (expected,) = pools.run(1, "support.programs.pipeline:dropout_losses", {})
    assert len(set(expected)) == 3
    num_ranks, pins = DROPOUT_PLANS[name]
    for own_part in (False, True)[: pins.get("dp", 1)]:
        for losses in pools.run(
            num_ranks, "support.programs.pipeline:dropout_losses", pins, own_part
        ):
            assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_checkpoint_goes_from_plan_to_plan(pools: Pools, tmp_path: Any) -> None:
    """From four stages to two with ZeRO-3, to one pass, and to the model itself."""
    layers = 2
    plans = [
        recut(planned("gpt2", layers, 4, pinned({"pp": 4})), schedules(4)[1]),
        planned("gpt2", layers, 4, pinned(MESHES["pp2 x dp2, zero3"])),
        planned("gpt2", layers, 4, (("microbatches", 1), ("pp", 1), ("tp", 4))),
    ]
    texts = [plan_to_json(plan) for plan in plans]
    for n, rotated in enumerate((texts, texts[1:] + texts[:1])):
        folder, captured = str(tmp_path / str(n)), captured_model("gpt2", layers)
        arguments = ("gpt2", layers, captured, rotated, folder)
        assert pools.run(4, "support.programs.pipeline:save_and_load", *arguments) == [[]] * 4


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("pins", [{}, {"microbatches": 4}])
def test_train_step_means_the_same_under_every_plan(pins: dict[str, int]) -> None:
    model, batch = Regression().double(), {"x": torch.randn(8, 4, dtype=torch.float64)}
    options = meshfold.CompileOptions(pins=pins)
    compiled = meshfold.compile(model, "local-cpux1", batch, options=options)
    expected = model(**batch)
    expected.backward()
    expected = expected.detach()
    for times in (1, 2):
        loss = compiled.train_step(batch)
        assert not loss.requires_grad
        assert abs(float(loss - expected)) < TOLERANCE
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = compiled.get_parameter(name).grad
            assert gradient is not None
            assert torch.allclose(gradient, times * parameter.grad, rtol=1e-13)
    assert compiled.num_forwards == 2
    with torch.no_grad():
        # Gradients are the point of a step, whatever surrounds it.
        assert abs(float(compiled.train_step(batch) - expected)) < TOLERANCE


def test_a_failed_step_leaves_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Regression().double(), {"x": torch.randn(8, 4, dtype=torch.float64)}
    options = meshfold.CompileOptions(pins={"microbatches": 4})
    compiled = meshfold.compile(model, "local-cpux1", batch, options=options)
    calls, run_microbatch = [], ProgramRunner.run_microbatch

    def failing(*arguments: Any, **updates: bool) -> list[torch.Tensor]:
        calls.append(arguments)
        if len(calls) in (3, 9):
            raise RuntimeError("out of memory")
        return run_microbatch(*arguments, **updates)

    monkeypatch.setattr(ProgramRunner, "run_microbatch", failing)
    for times in (1, 2):
        grads = {name: p.grad for name, p in compiled.named_parameters()}
        before = {name: None if g is None else g.clone() for name, g in grads.items()}
        with pytest.raises(RuntimeError, match="out of memory"):
            compiled.train_step(batch)
        assert compiled.num_forwards == times - 1
        for name, parameter in compiled.named_parameters():
            earlier = before[name]
            assert (parameter.grad is None) == (earlier is None)
            assert earlier is None or torch.equal(parameter.grad, earlier)
        compiled.train_step(batch)
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        found = compiled.get_parameter(name).grad
        assert found is not None and parameter.grad is not None
        assert torch.allclose(found, 2 * parameter.grad, rtol=1e-13)


def test_a_step_needs_a_loss() -> None:
    batch = {"x": torch.randn(8, 4)}
    compiled = meshfold.compile(torch.nn.Linear(4, 2), "local-cpux1", {"input": batch["x"]})
    with pytest.raises(OptionError, match=r"shape \[8, 2\], and a step needs a loss of no dims"):
        compiled.train_step({"input": batch["x"]})


def test_forward_alone_names_train_step() -> None:
    batch = {"x": torch.randn(8, 4)}
    options = meshfold.CompileOptions(pins={"microbatches": 4})
    compiled = meshfold.compile(Regression(), "local-cpux1", batch, options=options)
    with pytest.raises(OptionError, match="4 microbatches: .* take turns; call train_step"):
        compiled(**batch)


class Logits(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_microbatches_need_a_loss() -> None:
    options = meshfold.CompileOptions(pins={"microbatches": 4})
    with pytest.raises(OptionError, match="returns a tensor of shape .* not a loss"):
        meshfold.compile(Logits(), "local-cpux1", {"x": torch.randn(8, 4)}, options=options)
