"""Pipelines of models in which less repeats than there are stages: U-Nets, narrow stacks."""

from collections.abc import Callable
from typing import Any

import pytest
from support.models.hugging_face import BATCH as HUGGING_FACE_BATCH
from support.models.hugging_face import tiny_model
from support.models.unrepeated import BATCH, MAKERS, unet, widening
from support.processes.pool import Pools
from support.programs.one_device import difference, one_step_loss

from meshfold.capture.pipeline import capture
from meshfold.codegen.emit.pipeline import EmittedPipeline, emit_plan
from meshfold.cost_models.hardware.devices import resolve_cluster
from meshfold.errors import OptionError
from meshfold.ir.options import CompileOptions
from meshfold.memory_probe.prober import OpProber
from meshfold.passes.pipeline.tree import CUT_EXPERTS
from meshfold.passes.planner.find import find_plan_for
from meshfold.plan_file.io import plan_from_json, plan_to_json
from meshfold.validation.float64_mode import float64_everywhere


@pytest.mark.parametrize("made", [unet, widening])
def test_stages_of_one_region_compute_what_one_process_does(made: Callable[[], Any]) -> None:
    """Skip connections cross two and more stages; targets are uneven over microbatches."""
    model, batch = made()
    assert difference(model, batch, num_microbatches=2, num_stages=4) < 1e-12


def test_pieces_draw_what_the_whole_draws() -> None:
    model, batch = widening(dropout=0.5)
    losses = [one_step_loss(model.train(), batch, 2, stages) for stages in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


def test_a_plan_divides_a_unet_and_is_read_back() -> None:
    model, batch = unet()
    with float64_everywhere():
        folded = capture(model, batch).graph
    plan = find_plan_for(
        folded,
        resolve_cluster("local-cpu", 2),
        CompileOptions(pins={"pp": 2, "microbatches": 2, "recompute": "none"}),
        model_name="UNet",
        batch_size=BATCH,
        probe=OpProber(),
    )
    first, second = (sum(run.count for run in stage.runs) for stage in plan.stages)
    assert min(first, second) > 0 and first + second > len(folded.instances)
    assert any("equal layers than stages" in note for note in plan.notes)
    program = emit_plan(folded, plan_from_json(plan_to_json(plan)))
    assert isinstance(program, EmittedPipeline)
    # What the second stage reads of the first, for joins and the way down.
    assert len(program.graphs[1].arrives) > 1


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins", "num_parts"),
    [("unet", {"microbatches": 4}, 1), ("residual", {"batch_norm": "microbatch"}, 2)],
)
def test_stages_on_two_processes(
    pools: Pools, name: str, pins: dict[str, Any], num_parts: int
) -> None:
    """Buffers, too, wherever they are updated."""
    model, batch = MAKERS[name]()
    with float64_everywhere():
        folded = capture(model, batch).graph
    plan = find_plan_for(
        folded,
        resolve_cluster("local-cpu", 2),
        CompileOptions(pins={"pp": 2, "microbatches": 2, **pins}),
        model_name=name,
        batch_size=BATCH,
        probe=OpProber(),
    )
    arguments = (name, plan_to_json(plan), num_parts)
    errors = pools.run(2, "support.programs.one_device:difference_on_ranks", *arguments)
    assert max(errors) < 1e-12


def test_one_op_is_no_pipeline() -> None:
    model, batch = widening()
    with float64_everywhere():
        folded = capture(model, batch).graph
    options = CompileOptions(pins={"pp": 128})
    with pytest.raises(OptionError, match="fewer than stages"):
        find_plan_for(
            folded,
            resolve_cluster("local-cpu", 128),
            options,
            model_name="m",
            batch_size=BATCH,
            probe=OpProber(),
        )


def test_layers_with_experts_are_not_cut_where_ranks_share_them() -> None:
    """A cut may part rows from their experts; whoever pins ep keeps whole layers."""
    graph = capture(*tiny_model("mixtral")).graph
    for pins in ({}, {"ep": 2, "microbatches": 2}):
        plan = find_plan_for(
            graph,
            resolve_cluster("local-cpu", 4),
            CompileOptions(pins=pins),
            model_name="mixtral",
            batch_size=HUGGING_FACE_BATCH,
            probe=OpProber(),
        )
        assert not plan.pieces or plan.strategy.ep == 1
        assert (CUT_EXPERTS in plan.search.left_out) == (not pins)
        assert plan.strategy.ep == pins.get("ep", plan.strategy.ep)
