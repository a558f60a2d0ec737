"""The plan: fastest that fits, baselines, pins, and what is said when nothing fits."""

from dataclasses import replace
from functools import cache

import pytest
from support.models.hugging_face import BATCH, meta_llama, tiny_model

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import InfeasibleError, OptionError, PlanMismatchError
from meshfold.ir.op_graph import FoldedGraph
from meshfold.ir.options import CompileOptions
from meshfold.ir.plan import Plan
from meshfold.ir.strategy import KeptResults
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.one_pass.tree import (
    CONTEXT,
    EXPERTS,
    NODE,
    SAVED_ONCE,
    UNASKED_OFFLOAD,
)
from meshfold.passes.planner.best_mesh import BOUND, UNSHARDED
from meshfold.passes.planner.check import price_plan
from meshfold.passes.planner.find import find_plan_for
from meshfold.passes.planner.offload import PAYS_OFFLOAD
from meshfold.plan_file.io import plan_from_json, plan_to_json

PROBER = OpProber()


DEEP_BATCH = 8 * BATCH


@cache
def graph_of(family: str) -> FoldedGraph:
    """`deep gpt2`: activations of its layers are most of its memory."""
    if family == "deep gpt2":
        model, batch = tiny_model("gpt2", layers=6)
        batch = {name: x.repeat(DEEP_BATCH // BATCH, 1) for name, x in batch.items()}
    else:
        model, batch = tiny_model(family)
    return capture(model, batch).graph


def plan(num_devices: int = 4, family: str = "llama", batch_size: int = BATCH, **options) -> Plan:
    """In one pass; pipelines are those of test_find_pipeline.py."""
    progress = options.pop("progress", None)
    options["pins"] = {"microbatches": 1, **options.get("pins", {})}
    return find_plan_for(
        graph_of(family),
        resolve_cluster("local-cpu", num_devices),
        CompileOptions(**options),
        model_name=family,
        batch_size=batch_size,
        probe=PROBER,
        progress=progress,
    )


def test_small_model_takes_data_parallelism():
    found = plan()
    assert found.strategy.label == "dp4"
    assert found.memory.fits
    assert found.search.num_priced >= 1 and found.search.num_infeasible == 0
    assert found.model.num_parameters == sum(
        int.__mul__(*(*p.shape, 1, 1)[:2]) for p in graph_of("llama").parameters
    )


def test_baselines_stand_beside():
    rows = {c.name: c for c in plan().baselines}
    assert list(rows) == [
        "DDP",
        "ZeRO-3",
        "Megatron tp+sp in a node, dp outside",
        "best uniform strategy",
    ]
    assert rows["DDP"].strategy.label == "dp4"
    assert rows["ZeRO-3"].strategy.label == "dp4, zero3"
    assert rows["Megatron tp+sp in a node, dp outside"].strategy.label == "tp4+sp"
    assert rows["best uniform strategy"].step_s >= plan().search.lower_bound_s
    assert all(c.step_s > 0 and c.peak_bytes > 0 and c.fits for c in rows.values())


def test_baseline_that_the_batch_does_not_divide_is_noted():
    found = plan(8)
    assert [c.name for c in found.baselines][0] != "DDP"
    assert any(n.startswith("baseline DDP is not priced: a batch of 4") for n in found.notes)


def test_less_memory_shards_more():
    """The budget lies between data parallelism and its sharded rival."""
    free = plan()
    rows = {c.name: c for c in free.baselines}
    budget = (rows["DDP"].peak_bytes + rows["ZeRO-3"].peak_bytes) // 2
    tight = plan(memory_bytes=budget)
    assert [r.choice.name for r in tight.regions] != [r.choice.name for r in free.regions]
    # As the search counts it; what emission adds has to fit as well (refine/fitting.py).
    assert tight.memory.peak - tight.memory.emitted <= budget
    assert tight.time.step_s >= free.time.step_s
    ddp = next(c for c in tight.baselines if c.name == "DDP")
    assert not ddp.fits and "too much" in ddp.note


def test_nothing_fits():
    with pytest.raises(InfeasibleError, match="nothing fits in 50.0 kB per device") as caught:
        plan(memory_bytes=50_000)
    error = caught.value
    assert error.available_bytes == 50_000
    assert error.required_bytes > error.available_bytes
    assert error.best_candidate in str(error)
    assert error.binding_constraint in str(error)
    assert "missing" in str(error)


@pytest.mark.parametrize(
    ("pins", "label"),
    [
        ({"tp": 4, "sp": 0}, "tp4"),
        ({"dp": 2, "tp": 2, "zero": 3, "sp": 1}, "dp2 x tp2+sp, zero3"),
        ({"dp": 4, "zero": 3}, "dp4, zero3"),
    ],
)
def test_pins_are_kept(pins, label):
    found = plan(pins=pins)
    assert found.strategy.label == label
    assert dict(found.pins) == {"microbatches": 1, **pins}
    assert found.mesh.num_ranks == 4


def test_batch_that_does_not_divide():
    with pytest.raises(OptionError, match="a batch of 4 does not divide over dp=8"):
        plan(8, pins={"dp": 8})


def test_pin_with_nothing_to_shard():
    with pytest.raises(OptionError, match="pin tp=17: no parameter .* over so many ranks"):
        plan(17, "vit", pins={"tp": 17, "dp": 1})


@pytest.mark.parametrize("pins", [{"dp": 1, "microbatches": 2}, {"pp": 2}])
def test_pin_with_nothing_to_shard_in_microbatches_and_stages(pins):
    with pytest.raises(OptionError, match="pin tp=17: no parameter .* over so many ranks"):
        plan(17 * pins.get("pp", 1), "vit", pins={"tp": 17, **pins})


def test_nothing_to_shard_on_any_degree_left():
    with pytest.raises(OptionError, match="tp=17: no parameter .* can be sharded"):
        plan(34, "vit", pins={"dp": 2})


def test_axis_that_shards_nothing_is_pruned():
    # Sizes are powers of two, and most of 17 ranks would hold none of 8 heads.
    found = plan(34, "vit", batch_size=34)
    assert found.search.pruned[UNSHARDED] > 0
    assert found.strategy.tp in (1, 2)


def test_same_input_same_plan():
    assert plan(family="bert") == plan(family="bert")


def test_one_device():
    found = plan(1)
    assert found.strategy.label == "one device"
    assert found.mesh.axes == ()
    assert found.time.exposed_communication_s == 0
    assert [c.name for c in found.baselines] == ["best uniform strategy"]


def test_progress_counts_meshes():
    calls = []
    plan(2, progress=lambda done, total, label: calls.append((done, total, label)))
    assert [c[0] for c in calls] == list(range(1, len(calls) + 1))
    assert {c[1] for c in calls} == {len(calls)}
    assert [c[2] for c in calls] == ["dp2", "tp2"]


def test_plan_describes_its_regions():
    found = plan(pins={"dp": 2, "tp": 2, "sp": 1, "zero": 3})
    graph = graph_of("llama")
    assert [r.name for r in found.regions] == [r.name for r in graph.regions]
    assert sum(r.num_instances for r in found.regions) == len(graph.instances)
    layer = found.regions[1]
    q_proj = next(p for p in layer.parameters if p.name == "self_attn.q_proj.weight")
    assert [str(t) for t in q_proj.stored] == ["S0/2", "S0"]
    assert [str(t) for t in q_proj.used] == ["R", "S0"]
    assert q_proj.num_bytes == 32 * 32 * 8 // 4
    assert len(layer.op_targets) == len(layer.typing.ops)
    assert layer.saved_bytes > 0
    assert set(layer.communication_s) == {"dp", "tp"}
    runs = found.stages[0].runs
    assert [(r.region, r.first, r.count) for r in runs] == [("A", 0, 1), ("B", 1, 2), ("C", 3, 1)]


@cache
def budgets() -> tuple[int, int]:
    """The least memory that some plan needs on 4 devices, and what the fastest one uses."""
    with pytest.raises(InfeasibleError) as caught:
        plan(memory_bytes=10_000)
    return caught.value.required_bytes, plan().memory.peak


def test_more_memory_is_never_slower():
    least, most = budgets()
    steps = [least + (most - least) * k // 8 for k in range(9)]
    plans = [plan(memory_bytes=n) for n in steps]
    times, gaps = [p.time.step_s for p in plans], [p.gap for p in plans]
    for slower, faster, gap in zip(times, times[1:], gaps[1:], strict=False):
        assert faster <= slower * (1 + gap) + 1e-12
    assert times[0] > times[-1]


def test_the_gap_is_true():
    """No uniform program that fits is below the bound."""
    least, most = budgets()
    found = plan(memory_bytes=(least + most) // 2)
    assert found.search.lower_bound_s <= found.time.step_s
    assert found.gap == pytest.approx(found.time.step_s / found.search.lower_bound_s - 1)
    for row in found.baselines:
        if row.fits and row.strategy.microbatches == 1:  # in the space of this search
            assert row.step_s >= found.search.lower_bound_s * (1 - 1e-9)
    assert found.search.unlimited_s <= found.time.step_s * (1 + 1e-9)
    # Changes of layout between layers are free in the bound; where there are none it counts memory.
    alone = plan(memory_bytes=(least + most) // 2, pins={"tp": 1}).search
    assert alone.unlimited_s <= alone.lower_bound_s * (1 + 1e-9)


def test_layers_are_mixed_when_memory_lies_between():
    """Neither all layers plain nor all recomputed: the budget is used up."""
    graph = graph_of("deep gpt2")
    deep = (1, "deep gpt2", DEEP_BATCH)
    plain = plan(*deep)
    with pytest.raises(InfeasibleError) as caught:
        plan(*deep, memory_bytes=10_000)
    budget = (plain.memory.peak + caught.value.required_bytes) // 2
    mixed = plan(*deep, memory_bytes=budget)
    chosen = {r.strategy.recompute for r in mixed.regions}
    assert len(chosen) > 1 and chosen != {"none"}
    assert sum(run.count for run in mixed.stages[0].runs) == len(graph.instances)
    assert caught.value.required_bytes <= mixed.memory.peak <= budget
    assert mixed.time.step_s > plain.time.step_s


@pytest.mark.parametrize("rule", [NODE, BOUND])
def test_prunings_keep_the_optimum(rule):
    least, most = budgets()
    options = {"memory_bytes": (least + most) // 2}
    cluster = resolve_cluster("dgx-v100x2", 16)
    found = [
        find_plan_for(
            graph_of("llama"),
            cluster,
            CompileOptions(without_rules=without, pins={"microbatches": 1}),
            model_name="llama",
            batch_size=16,
            probe=PROBER,
        )
        for without in ((), (rule,))
    ]
    assert rule not in found[1].search.pruned
    assert found[0].time.step_s == pytest.approx(found[1].time.step_s, rel=1e-9)
    assert plan(**options).time.step_s == pytest.approx(
        plan(without_rules=(rule,), **options).time.step_s, rel=1e-9
    )


def plan_with_and_without(cut, graph, batch_size):
    """The plan on 4 H100s with a pruning rule, after checking that without it none is faster or
    slower."""
    found = [
        find_plan_for(
            graph,
            resolve_cluster("dgx-h100", 4),
            CompileOptions(without_rules=without, pins={"microbatches": 1}),
            model_name="llama",
            batch_size=batch_size,
            probe=PROBER,
        )
        for without in ((), (cut,))
    ]
    assert cut in found[0].search.pruned and cut not in found[1].search.pruned
    assert found[0].time.step_s == pytest.approx(found[1].time.step_s, rel=1e-9)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [4, 2])
def test_without_the_pruning_rule_of_cp_the_plan_is_the_same(batch_size):
    """Of 4 sequences dp makes the most; of 2, dp2 x cp2 is offered either way."""
    graph = capture(*meta_llama(8192, batch_size)).graph
    with_cut = plan_with_and_without(CONTEXT, graph, batch_size)
    assert with_cut.strategy.cp == 4 // batch_size


@pytest.mark.slow
def test_without_the_pruning_rule_of_ep_the_plan_of_a_dense_model_is_the_same():
    """Then ep is a second dp axis."""
    graph = capture(*meta_llama(512, 4)).graph
    plan_with_and_without(EXPERTS, graph, 4)


def test_an_unknown_pruning_is_named():
    with pytest.raises(OptionError, match="no pruning is called 'nodes'"):
        plan(without_rules=("nodes",))


def test_selective_recomputation_runs_keeps_its_figures_and_what_it_keeps():
    found = plan(pins={"recompute": "selective"})
    assert found.strategy.recompute == "selective" and found.simulated is not None
    assert any(region.typing.kept != KeptResults() for region in found.regions)
    loaded = plan_from_json(plan_to_json(found))
    assert loaded == found
    priced = price_plan(graph_of("llama"), loaded, PROBER)
    assert (priced.time, priced.memory) == (found.time, found.memory)
    emit(graph_of("llama"), loaded)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_can_be_pinned(zero: int):
    found = plan(pins={"zero": zero})
    assert found.strategy.zero == zero


def on_v100(family: str = "gpt2", **options) -> Plan:
    """On one device with a link to its host."""
    return find_plan_for(
        graph_of(family),
        resolve_cluster("dgx-v100", 1),
        CompileOptions(**options),
        model_name=family,
        batch_size=DEEP_BATCH if family == "deep gpt2" else BATCH,
        probe=PROBER,
    )


@cache
def tight_bytes() -> int:
    """A budget in which some layers must recompute or offload."""
    with pytest.raises(InfeasibleError) as caught:
        on_v100("deep gpt2", memory_bytes=2**30)
    return (caught.value.required_bytes + on_v100("deep gpt2").memory.peak) // 2


def test_offload_competes_where_it_is_allowed():
    here = on_v100("deep gpt2", memory_bytes=tight_bytes(), pins={"offload": "none"})
    asked = on_v100("deep gpt2", memory_bytes=tight_bytes(), allow_offload=True)
    # Of five ways to recompute and five to offload.
    assert on_v100("deep gpt2").search.pruned[UNASKED_OFFLOAD] == 20
    assert {region.strategy.offload for region in asked.regions} > {"none"}
    # More leaves to choose from: faster here, where they are what memory asks for.
    assert asked.time.step_s < here.time.step_s
    assert asked.memory.peak <= tight_bytes()
    assert asked.search.left_out[SAVED_ONCE] == 3
    # What fits without is slow for lack of memory.
    unasked = on_v100("deep gpt2", memory_bytes=tight_bytes())
    assert PAYS_OFFLOAD in unasked.notes and PAYS_OFFLOAD not in here.notes
    assert unasked.step_s <= asked.step_s * (1 + 1e-9) < here.step_s


def test_a_plan_with_activations_on_the_host_keeps_its_figures_and_is_emitted():
    found = on_v100(pins={"offload": "activations"})
    (choice,) = {region.strategy for region in found.regions}
    assert (choice.recompute, choice.offload) == ("none", "activations")
    (note,) = (note for note in found.notes if "wait in the host's memory" in note)
    assert note.startswith("activations of 3 of 4 layers wait")
    loaded = plan_from_json(plan_to_json(found))
    assert loaded == found
    priced = price_plan(graph_of("gpt2"), loaded, PROBER)
    assert (priced.time, priced.memory) == (found.time, found.memory)
    assert priced.simulated == found.simulated is not None
    emitted = emit(graph_of("gpt2"), loaded)
    assert emitted.saved_on_host == frozenset(range(len(found.regions)))
    assert "what it saves waits in the host's memory" in "\n".join(emitted.body())


def test_offload_without_a_link_to_the_host_is_not_priced():
    found = on_v100(pins={"offload": "activations"})
    (group,) = found.cluster.groups
    device = replace(group.device, host_bytes_per_s=0.0)
    unknown = replace(found.cluster, groups=(replace(group, device=device),))
    with pytest.raises(PlanMismatchError, match="nothing is known about the link"):
        price_plan(graph_of("gpt2"), replace(found, cluster=unknown), PROBER)
