"""Emitted programs: expert-level communication, folded, the same text for the same plan."""

import inspect
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.models.hard_to_verify import odd_names
from support.models.hugging_face import tiny_model
from support.programs.local_programs import (
    Rank,
    capture,
    emit_uniform,
    gradients,
    local_part,
    on_ranks,
)
from support.programs.local_programs import stack_model as stack
from support.programs.plans import BLOCK, example_plan

from meshfold.api import find_plan
from meshfold.capture.pipeline import Captured
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.emit.region import check_runs, emit_typed, schedule
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.codegen.program.text import group_of
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.cost_models.op_costs.cost_model import CostModel
from meshfold.errors import PlanMismatchError
from meshfold.ir.options import CompileOptions
from meshfold.ir.spmd import INVARIANT, Shard
from meshfold.ir.strategy import Recompute, UniformStrategy
from meshfold.validation.float64_mode import float64_everywhere

TP = UniformStrategy(tp=2)
TP_SP = UniformStrategy(tp=2, sequence_parallel=True)
DP = UniformStrategy(dp=2)


@cache
def captured(family: str, layers: int) -> Captured:
    model, batch = tiny_model(family, layers=layers)
    with float64_everywhere():
        return capture(model, batch)


@cache
def program(family: str, strategy: UniformStrategy, layers: int = 3) -> EmittedProgram:
    return emit_uniform(captured(family, layers), strategy, 4)


def layer_text(family: str, strategy: UniformStrategy) -> str:
    """Text of the region with most instances."""
    emitted = program(family, strategy)
    (number, _) = Counter(emitted.programs).most_common(1)[0]
    name = emitted.regions[number].name
    return re.split(r"^region ", emitted.text(0), flags=re.MULTILINE)[
        1 + [r.name for r in emitted.regions].index(name)
    ]


def starts(text: str) -> Counter[str]:
    return Counter(re.findall(r"= start_(\w+)\(context", text))


def collectives(family: str, strategy: UniformStrategy, layers: int) -> tuple[Counter, Counter]:
    """What rank 0 starts in (forward, backward) of a whole step."""
    emitted = program(family, strategy, layers)
    model, batch = tiny_model(family, layers=layers)

    def body(rank: Rank) -> tuple[Counter, Counter]:
        loss = rank.loss(batch)
        forward = Counter(kind for kind, _ in rank.mesh.log)
        loss.backward()
        return forward, Counter(kind for kind, _ in rank.mesh.log) - forward

    return on_ranks(model, captured(family, layers), emitted, body)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tensor_parallel_layer_has_two_all_reduces_each_way(family: str) -> None:
    assert starts(layer_text(family, TP)) == {"all_reduce": 2, "gradient_all_reduce": 2}
    less, more = (collectives(family, TP, layers) for layers in (2, 3))
    assert more[0] - less[0] == {"all_reduce": 2}
    assert more[1] - less[1] == {"all_reduce": 2}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_sequence_parallel_layer_has_two_gathers_and_two_scatters(family: str) -> None:
    assert starts(layer_text(family, TP_SP)) == {"all_gather": 2, "reduce_scatter": 2}
    less, more = (collectives(family, TP_SP, layers) for layers in (2, 3))
    assert more[0] - less[0] == {"all_gather": 2, "reduce_scatter": 2}
    # Backward besides: the gradients of norms and biases, one group a layer.
    assert more[1] - less[1] == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}


def test_every_start_has_its_wait() -> None:
    for strategy in (TP, TP_SP, UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True)):
        text = program("gpt2", strategy).text(0)
        waits = Counter(re.findall(r"= wait_(\w+)\(context, start_", text))
        assert waits == starts(text)


def test_equal_layers_share_one_graph() -> None:
    emitted = program("llama", TP)
    assert len(emitted.programs) == len(emitted.folded.instances)
    assert len(emitted.regions) == len(emitted.folded.regions)
    assert max(Counter(emitted.programs).values()) == 3


def test_a_value_that_arrives_in_another_layout_gets_its_own_graph() -> None:
    model, batch = stack(4)
    found = capture(model, batch)
    base = emit_uniform(found, DP, 4)
    typings = list(base.typings)
    # The first layer hands its result on whole.
    typings[0] = replace(typings[0], outputs=((INVARIANT,),))
    costs = CostModel(resolve_cluster("local-cpu", 2), base.mesh)
    emitted = emit_typed(found.graph, typings, costs)
    assert [r.name for r in emitted.regions] == ["A", "B", "B.1", "C"]
    assert emitted.regions[1].slots[0] == (INVARIANT,)
    assert emitted.regions[2].slots[0] == (Shard(0),)
    expected = gradients(model, batch)

    def body(rank: Rank) -> float:
        rank.loss(batch).backward()
        return max(
            float((p.grad - local_part(emitted, n, expected[n], rank.mesh)).abs().max())
            for n, p in rank.parameters.items()
        )

    assert max(on_ranks(model, found, emitted, body)) < 1e-14


def test_gathers_run_one_gathering_instance_ahead() -> None:
    def text(*makes: bool) -> str:
        return " ".join(map(str, schedule(makes)))

    assert text(True, True, True) == "G0 F0+G1 X0 F1+G2 X1 F2"
    assert text(False, True, False, True, False) == "G1 F0 F1+G3 X1 F2 F3 F4"
    assert text(False, False) == "F0 F1"


def test_text_names_the_rank_its_groups_and_local_shapes() -> None:
    text = program("gpt2", UniformStrategy(dp=2, tp=2, zero=3, sequence_parallel=True)).text(3)
    assert text.startswith("rank 3 of 4 (dp 1, tp 1) on dp2 x tp2\n  group dp: 2 ranks 1, 3\n")
    assert "group_0: all-gather dp; backward reduce-scatter dp; float64\n" in text
    assert "    attn.c_attn.weight [32, 96]: S0,S1/3 -> R,S1/3\n" in text
    assert "    ln_1.weight [32]: S0,I -> R,R, then all-reduce tp\n" in text
    assert re.search(r"attn_c_attn_weight = getitem\(wait_group, \d+\)  # R,S1/3 float64", text)


def test_only_the_heading_depends_on_the_rank() -> None:
    emitted = program("llama", UniformStrategy(dp=2, tp=2))
    bodies = {emitted.text(rank).split("\nsteps\n")[1] for rank in range(4)}
    assert len(bodies) == 1
    again = emit_uniform(captured("llama", 3), UniformStrategy(dp=2, tp=2), 4)
    assert again.digest == emitted.digest
    assert program("llama", TP).digest != emitted.digest
    with pytest.raises(ValueError, match="rank 4 is not on a mesh of 4 ranks"):
        emitted.text(4)


def test_groups_of_a_rank_are_those_of_the_mesh() -> None:
    mesh = program("llama", UniformStrategy(dp=2, tp=2)).mesh
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        for group in mesh.groups(axes):
            for rank in group:
                assert tuple(group_of(mesh, mesh.coords(rank), axes)) == group


def test_a_plan_with_other_regions_is_refused() -> None:
    class OtherPlan:
        regions = ()
        stages = ()

    with pytest.raises(PlanMismatchError, match="it places 0 of 5 layers; plan this model again"):
        emit(captured("llama", 3).graph, OtherPlan())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recompute", "changes", "why"),
    [
        ("selective", {}, "the region is recomputed"),
        ("none", {"mode": "scheduled"}, "the plan is for mode scheduled"),
        ("none", {"schedule": "1f1b(2 x 2)"}, "the plan has several microbatches or stages"),
    ],
)
def test_activations_that_cannot_go_to_the_host_are_refused(
    recompute: Recompute, changes: dict[str, Any], why: str
) -> None:
    planned = replace(
        BLOCK,
        strategy=UniformStrategy(dp=2, offload="activations"),
        typing=replace(BLOCK.typing, recompute=recompute),
    )
    plan = replace(example_plan(), regions=(planned,), **changes)
    with pytest.raises(
        PlanMismatchError, match=f"region B is planned as dp2, offload act.*: {why}"
    ):
        check_runs(plan)


def test_without_gradients_the_loss_is_the_same() -> None:
    emitted = program("llama", TP)
    model, batch = tiny_model("llama", layers=3)

    def body(rank: Rank) -> float:
        with torch.no_grad():
            return float(rank.loss(batch))

    with float64_everywhere():
        expected = float(model(**batch).loss.detach())
    for loss in on_ranks(model, captured("llama", 3), emitted, body):
        assert loss == pytest.approx(expected, abs=1e-12)


def test_names_that_are_none_in_python_become_names_of_their_own() -> None:
    model, inputs = odd_names()
    for pins in ({"tp": 2, "microbatches": 1}, {"dp": 2, "zero": 3, "microbatches": 1}):
        plan = find_plan(model, "local-cpux2", inputs, options=CompileOptions(pins=pins))
        regions = emit(capture(model, inputs).graph, plan).regions
        for region in regions:
            names = [n.name for n in region.graph.graph.nodes]
            assert len({*names}) == len(names)
            assert all(name.isidentifier() and name.isascii() for name in names)
            assert [n.name for n in region.graph.graph.nodes if n.op == "placeholder"] == list(
                inspect.signature(region.graph.forward).parameters
            )
