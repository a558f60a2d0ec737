"""What frameworks do otherwise than an emitted program, by hand-computed cases; runs by name."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from published.even_stages import even_boundaries, even_stages
from published.frameworks import Traits, traits_of
from published.memory import measured_bytes
from published.named import NAMED, Named, label, named_table, spent
from published.predict import captured_shape, peak_of, saved_s, step_s_of
from published.runs import DEFAULT, WITH_MEMORY, read_runs
from published.setup import Shape, setup_of
from support.models.hugging_face import BATCH, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.cost_models.hardware.devices import cluster, resolve_cluster
from meshfold.cost_models.hardware.mesh_placement import build_mesh
from meshfold.cost_models.op_costs.compute import op_name
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.planner.find import find_plan_for

OF_NEMO = next(run for run in read_runs(DEFAULT).runs if run.dataset == "dgxc_h100")
"""15B on tp2 with sequence parallelism: 32 layers of 6144, 2 samples of 4096 a microbatch."""


OF_GPT = read_runs(WITH_MEMORY).runs[0]
"""A small GPT of unfused attention: 12 layers of 512, 8 heads, sequences of 1024."""


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


def test_frameworks_add_gradients_up_in_one_go() -> None:
    """Of 10 bytes that a program moves: 6, or all."""
    names = {
        "NeMo 2.x / Megatron-Core": 1.0,
        "Megatron-DeepSpeed (GPT, 1F1B)": 1.0,
        "Megatron-LM PTD": 0.0,
        "Megatron-LM 2022": 1.0,
        "DeepSpeed ZeRO-3": 0.0,
        "torchtitan (PyTorch FSDP2)": 0.0,
    }
    for name, times in names.items():
        assert traits_of(replace(OF_NEMO, framework=name)).less_to_add == times


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
    """2 s of tp, 60 % hidden; of 4 GB of gradients each of nine microbatches moves as much less; in
    16 bits each of ten moves 4 GB less besides."""
    assert step_s_of(plan_of(), Traits(regathered_bytes=1.0)) == 10.0
    assert step_s_of(plan_of(), Traits(hidden_tp_share=0.6)) == pytest.approx(10 - 0.6 * 2)
    adding = step_s_of(plan_of(), Traits(less_to_add=1.0))
    rate = 3.0e12  # of 3.35e12, what copies reach
    assert 10.0 - adding == pytest.approx(9 * 4e9 / rate, rel=1e-2)
    in_16_bits = step_s_of(plan_of(), Traits(less_to_add=1.0, adds_16_bits=True))
    assert adding - in_16_bits == pytest.approx(10 * 4e9 / rate, rel=1e-2)
    of_one = plan_of(strategy=SimpleNamespace(microbatches=1, label=""))
    assert step_s_of(of_one, Traits(less_to_add=1.0)) == 10.0


def test_stages_have_like_numbers_of_layers() -> None:
    """12 layers between an embedding and a head, in 4 stages; 126 and those two, in 16."""

    def of(repeated: int, num_stages: int) -> tuple[int, ...] | None:
        runs = [SimpleNamespace(count=count) for count in (1, repeated, 1)]
        problem: Any = SimpleNamespace(runs=runs, num_layers=repeated + 2)
        schedule: Any = SimpleNamespace(num_stages=num_stages)
        return even_boundaries(problem, schedule)

    assert of(12, 4) == (0, 4, 7, 10, 14)
    assert of(126, 16) == (*range(0, 128, 8), 128)
    assert of(12, 1) == (0, 14)
    assert of(12, 5) is None


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved", 4)])
def test_plans_inside_have_even_stages(schedule: str, num_stages: int) -> None:
    """Four layers, of one stage a device or two: the embedding is with the first, the head with the
    last."""
    pins: dict[str, int | str] = {"pp": 2, "microbatches": 4, "schedule": schedule}
    graph = capture(*tiny_model("llama", layers=4)).graph
    of = graph, resolve_cluster("local-cpu", 2), CompileOptions(pins=pins)
    with even_stages():
        plan = find_plan_for(*of, model_name="llama", batch_size=BATCH, probe=OpProber())
    counts = [sum(run.count for run in stage.runs) for stage in plan.stages]
    each = 4 // num_stages
    assert counts == [1 + each, *[each] * (num_stages - 2), each + 1]


def test_a_last_stage_that_recomputes_nothing_shortens_what_waits_for_it() -> None:
    """1 s less for each of 4 microbatches of the slower stage; of a faster one the first alone is
    waited for. Without a schedule there is one microbatch. Forwards likewise."""

    def stages(*times: tuple[float, float]) -> tuple[Any, ...]:
        costs = (SimpleNamespace(forward_s=f, backward_s=b) for f, b in times)
        return tuple(SimpleNamespace(costs=c) for c in costs)

    slow = plan_of(schedule="1f1b(2 x 4)", stages=stages((1, 2), (2, 5)))
    assert saved_s(slow, [0, 0], 1.0) == pytest.approx(4.0)
    fast = plan_of(schedule="1f1b(2 x 4)", stages=stages((2, 4), (1, 2)))
    assert saved_s(fast, [0, 0], 1.0) == pytest.approx(1.0)
    assert saved_s(fast, [0.5, 0], 0.0) == pytest.approx(3 * 0.5)  # one is in the wait
    whole = plan_of(schedule="", stages=stages((2, 4)))
    assert saved_s(whole, [0.5], 1.0) == 1.5


def test_memory_of_megatron_by_hand() -> None:
    """The last of 4 devices with 3 virtual stages of a layer each: 9 forwards in flight. A layer
    keeps 3 GB, 5 bytes of its scores and 2 of masks; the head keeps 1 GB and 4 bytes a logit."""
    run = replace(OF_GPT, pp=4, vpp=3, dp=2, zero_stage=0, micro_batch_size=4, global_batch_size=32)
    table = SimpleNamespace(shape=(run.vocab_size, 512), used=())
    weight = SimpleNamespace(shape=(512, 512), used=())

    def region(name: str, num_instances: int, saved_bytes: float, *parameters: Any) -> Any:
        return SimpleNamespace(
            name=name, num_instances=num_instances, saved_bytes=saved_bytes, parameters=parameters
        )

    def stage(*runs: tuple[str, int]) -> Any:
        return SimpleNamespace(runs=[SimpleNamespace(region=r, count=n) for r, n in runs])

    plan: Any = SimpleNamespace(
        regions=(region("B", 12, 3e9, weight), region("C", 1, 1e9, table, table)),
        stages=(*[stage(("B", 1))] * 11, stage(("B", 1), ("C", 1))),
        mesh=SimpleNamespace(sizes=()),
    )
    layer = 3e9 + 5 * 4 * 8 * 1024**2 + 2 * 4 * 1024 * 512
    states = 18 * (3 * 512**2 + run.vocab_size * 512)
    head = 1e9 + 4 * 4 * 1024 * run.vocab_size
    assert measured_bytes(plan, run) == pytest.approx(9 * layer + states + head + 75e6)
    sharded = replace(run, zero_stage=1)
    less = measured_bytes(plan, run) - measured_bytes(plan, sharded)
    assert less == pytest.approx(states * (1 - (6 + 12 / 2) / 18))


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
