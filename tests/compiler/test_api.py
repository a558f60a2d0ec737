"""The public calls and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.processes.pool import Pools
from support.programs.local_programs import stack_model
from torch import Tensor, nn

import meshfold
from meshfold.api import batch_size_of
from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import CaptureError, OptionError, PlanMismatchError
from meshfold.plan_file.io import plan_to_json, save_plan

TWO = resolve_cluster("local-cpu", 2)


def test_find_plan_takes_a_preset_and_keeps_pins() -> None:
    model, batch = stack_model(2, width=16, batch=8)
    options = meshfold.CompileOptions(pins={"dp": 4, "tp": 2, "zero": 3})
    plan = meshfold.find_plan(model, "dgx-h100", batch, options=options)
    assert (plan.world_size, plan.strategy.dp, plan.strategy.tp) == (8, 4, 2)
    assert plan.model.name == "Stack" and plan.model.batch_size == 8


def test_what_is_no_model_and_what_is_no_cluster_is_refused() -> None:
    model, batch = stack_model(2)
    for wrong, shown in ((None, "None"), (nn.Linear, "the class Linear")):
        with pytest.raises(OptionError, match=f"the model is {shown}; pass an nn.Module"):
            meshfold.compile(wrong, "local-cpu", batch)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the cluster is None; pass a ClusterSpec, a name or"):
        meshfold.compile(model, None, batch)  # type: ignore[arg-type]


def _stored(plan: meshfold.Plan) -> set[str]:
    return {p.dtype for region in plan.regions for p in region.parameters}


@pytest.mark.parametrize(
    ("cluster", "dtype", "precision", "computes", "stored"),
    [
        ("dgx-h100", torch.float32, "bf16", "bfloat16", "float32"),
        ("dgx-h100", torch.bfloat16, "bf16", "bfloat16", "float32"),
        ("dgx-h100", torch.float64, "bf16", "float64", "float64"),  # always deliberate
        ("dgx-v100", torch.float32, "model", "float32", "float32"),
        ("local-cpux2", torch.bfloat16, "model", "bfloat16", "bfloat16"),
    ],
)
def test_by_default_a_plan_computes_in_what_its_devices_are_fast_in(
    cluster: str, dtype: torch.dtype, precision: str, computes: str, stored: str
) -> None:
    model, batch = stack_model(2, width=16, batch=8)
    inputs = {name: x.to(dtype) for name, x in batch.items()}
    plan = meshfold.find_plan(model.to(dtype), cluster, inputs)
    assert plan.precision == precision
    assert plan.model.compute_dtype == computes
    assert _stored(plan) == {stored}
    kept = meshfold.CompileOptions(precision="model")
    plan = meshfold.find_plan(model, cluster, inputs, options=kept)
    assert plan.precision == "model"
    assert _stored(plan) == {str(dtype).removeprefix("torch.")}


def test_compile_takes_a_plan_and_a_plan_file(tmp_path: Path) -> None:
    model, batch = stack_model(2)
    plan = meshfold.find_plan(model, TWO, batch)
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    digests = {
        meshfold.compile(model, TWO, batch, plan=given).program.digest
        for given in (plan, path, str(path), None)
    }
    assert len(digests) == 1


def test_a_plan_for_another_batch_is_refused() -> None:
    model, batch = stack_model(2)
    plan = meshfold.find_plan(model, TWO, batch)
    larger = {name: torch.cat([x, x]) for name, x in batch.items()}
    with pytest.raises(PlanMismatchError, match=r"x float64\[4, 8\].*these are x float64\[8, 8\]"):
        meshfold.compile(model, TWO, larger, plan=plan)


def test_a_plan_for_another_model_is_refused() -> None:
    model, batch = stack_model(2)
    plan = meshfold.find_plan(model, TWO, batch)
    with pytest.raises(PlanMismatchError, match="made for another model.*plan this model"):
        meshfold.compile(stack_model(3)[0], TWO, batch, plan=plan)


def test_the_batch_is_the_first_dim_that_most_inputs_share() -> None:
    model, batch = stack_model(2)
    assert batch_size_of(capture(model, batch)) == 4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_plan_for_another_number_of_processes_is_refused(pools: Pools) -> None:
    model, batch = stack_model(2)
    plan = meshfold.find_plan(model, resolve_cluster("local-cpu", 4), batch)
    for message in pools.run(2, "support.programs.emit:mismatch_of", [plan_to_json(plan)] * 2):
        assert message.startswith("the plan is for 4 processes, this job has 2; ")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_with_different_programs_find_out_before_they_wait_for_ever(pools: Pools) -> None:
    model, batch = stack_model(2)
    plans = [
        meshfold.find_plan(model, TWO, batch, options=meshfold.CompileOptions(pins=pins))
        for pins in ({"dp": 2, "zero": 0}, {"dp": 2, "zero": 3})
    ]
    for message in pools.run(
        2, "support.programs.emit:mismatch_of", list(map(plan_to_json, plans))
    ):
        assert message.startswith("rank 1 has another program than rank 0 (")


def test_the_seed_of_a_plan_decides_dropout() -> None:
    model, batch = stack_model(2, dropout=0.5)
    one = resolve_cluster("local-cpu", 1)
    plan = meshfold.find_plan(model, one, batch)
    losses = [
        float(meshfold.compile(model, one, batch, plan=replace(plan, seed=s))(**batch).detach())
        for s in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"state": self.linear(x), "pooled": self.linear(x).mean(0)}


def test_several_outputs_without_a_loss_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"several tensors \(state, pooled\) and none of them is"
    ):
        meshfold.find_plan(TwoOutputs(), TWO, {"x": torch.randn(2, 4)})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_preset_without_a_count_is_as_large_as_the_job(pools: Pools) -> None:
    assert pools.run(2, "support.programs.emit:world_size_of", "local-cpu") == [2, 2]
