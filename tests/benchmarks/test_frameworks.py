"""What frameworks do otherwise than an emitted program, by hand-computed cases; runs by name."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from published.frameworks import Traits, traits_of
from published.named import NAMED, Named, label, named_table, spent
from published.predict import captured_shape, peak_of, step_s_of
from published.runs import DEFAULT, read_runs
from published.setup import Shape, setup_of

from meshfold.cost_models.hardware.devices import cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.compute import op_name

OF_NEMO = next(run for run in read_runs(DEFAULT).runs if run.dataset == "dgxc_h100")
"""15B on tp2 with sequence parallelism: 32 layers of 6144, 2 samples of 4096 a microbatch."""


def plan_of(**fields: Any) -> Any:
    """What is read of a plan: 2 layers of 3 GB of which 10 microbatches keep 40 GB."""
    spec = cluster("dgx-h100")
    plan = {
        "step_s": 10.0,
        "time": SimpleNamespace(
            communication_s={"tp": 2.0},
            forward_s=2.0,
            backward_s=4.0,
            optimizer_s=0.5,
            exposed_communication_s=3.0,
            bubble_s=0.5,
        ),
        "memory": SimpleNamespace(peak=60e9, gradients=4e9, activations=40e9, loss=0),
        "regions": (SimpleNamespace(num_instances=2, saved_bytes=3e9),),
        "strategy": SimpleNamespace(microbatches=10, label="dp4 x tp2"),
        "schedule": None,
        "cluster": spec,
        "mesh": build_mesh(spec, 4, 2),
    }
    return SimpleNamespace(**(plan | fields))


def test_collectives_of_tp_run_beside_their_products() -> None:
    """Half of a collective of two pieces, less what both lose while they overlap."""
    assert traits_of(OF_NEMO).hidden_tp_share == pytest.approx((1 - 1 / 2) * (2 - 1.1256))
    of_eight = replace(OF_NEMO, tp=8, dp=2)
    assert traits_of(of_eight).hidden_tp_share == pytest.approx((1 - 1 / 8) * (2 - 1.1256))
    assert traits_of(replace(OF_NEMO, sequence_parallel=False)).hidden_tp_share == 0
    assert traits_of(replace(OF_NEMO, framework="Megatron-LM 0.14")).hidden_tp_share == 0


def test_gathered_sequences_are_gathered_again() -> None:
    """2 times 2 x 4096 rows of 6144 numbers of 2 bytes, in 32 layers, but for a rank's own half."""
    once = 2 * 4096 * 6144 * 2
    assert traits_of(OF_NEMO).regathered_bytes == 32 * 2 * once / 2
    assert traits_of(replace(OF_NEMO, recompute="full")).regathered_bytes == 0
    assert traits_of(replace(OF_NEMO, framework="torchtitan")).regathered_bytes == 0


def test_scores_of_unfused_attention_are_kept() -> None:
    """5 bytes each of 2 samples, 24 heads on a rank and 4096 x 4096 positions, in 32 layers."""
    old = replace(OF_NEMO, framework="Megatron-LM v2 (2020)")
    assert traits_of(old).score_bytes == 32 * 5 * 2 * 24 * 4096**2
    assert traits_of(replace(old, recompute="selective")).score_bytes == 0
    assert traits_of(OF_NEMO).score_bytes == 0


def test_memory_in_a_framework() -> None:
    """Half of 4 GB of gradients, and a quarter of what layers keep: 1.5 of 6 GB."""
    traits = Traits(gradient_share=0.5, regathered_bytes=1.5e9)
    assert peak_of(plan_of(), traits) == pytest.approx(60e9 - 2e9 - 10e9)
    assert peak_of(plan_of(), Traits(score_bytes=1.5e9)) == pytest.approx(60e9 + 10e9)
    assert peak_of(plan_of(), Traits()) == 60e9


def test_seconds_in_a_framework() -> None:
    """2 s of tp, 60 % hidden; 4 GB less to move for each of 10 microbatches."""
    assert step_s_of(plan_of(), Traits(regathered_bytes=1.0)) == 10.0
    assert step_s_of(plan_of(), Traits(hidden_tp_share=0.6)) == pytest.approx(10 - 0.6 * 2)
    adding = step_s_of(plan_of(), Traits(adds_in_products=True))
    assert adding == pytest.approx(10 - 10 * 4e9 / (3.35e12 * 0.91), rel=2e-3)
    of_one = plan_of(strategy=SimpleNamespace(microbatches=1, label=""))
    assert step_s_of(of_one, Traits(adds_in_products=True)) == 10.0


def test_fused_kernels_are_one_op() -> None:
    """Rotary embeddings of a Llama are a product each for queries and keys, and keys are not
    copied for more heads."""
    fields = (
        ("model_type", "llama"),
        ("hidden_size", 64),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("intermediate_size", 128),
        ("vocab_size", 128),
    )
    shape = Shape(fields, batch=2, sequence=16, precision="model")

    def names(shape: Shape) -> list[str]:
        layer = max(captured_shape(shape).graph.regions, key=lambda r: len(r.graph.ops))
        return [op_name(op.target) for op in layer.graph.ops]

    apart, fused = names(shape), names(replace(shape, is_fused=True))
    assert {"neg", "cat", "expand"} <= set(apart)
    assert not {"neg", "cat", "expand"} & set(fused)
    assert fused.count("mul") == 2


def test_large_runs_are_complete_and_can_be_asked_for() -> None:
    found = read_runs(NAMED)
    assert not found.incomplete
    assert {"gpt", "llama", "mixtral"} == {run.arch for run in found.runs}
    setups = {run.id: setup_of(run) for run in found.runs}
    assert all(run.title for run in found.runs)
    pins = setups["mixtral-8x7b-64"].options.pins
    assert (pins["dp"], pins["ep"], pins["dp_shard"], pins["chunked_loss"]) == (2, 8, 2, 0)
    assert dict(setups["mixtral-8x7b-64"].shape.fields)["num_local_experts"] == 8


def test_a_large_run_is_told_beside_the_plan_that_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = next(r for r in read_runs(NAMED).runs if r.id == "mt-nlg-530b-2240")
    chosen = plan_of(step_s=8.0, schedule="1f1b(2 x 4)")
    one = Named(run, 66.11, 40 * 2.0**30, 80 * 2**30, plan_of(), chosen)
    assert one.error == pytest.approx(0.1)
    assert spent(plan_of()) == "compute 6.50, exposed 3.00, bubble 0.50, 55.9 GiB"
    assert label(chosen) == "dp4 x tp2 1f1b(2 x 4)"
    named_table(iter([one]))
    _, row, published, ours = capsys.readouterr().out.splitlines()
    assert row.split()[-7:] == ["60.10", "s", "66.11", "s", "+10.0%", "40.0", "80"]
    assert "10.00 s" in published and "8.00 s" in ours
