"""What the search picks by itself, on random machines and budgets, is right."""

import pytest
from support.models.hugging_face import tiny_model
from support.processes.pool import Pools
from support.programs.local_programs import errors_of_a_step
from support.search.free_draws import (
    NUM_ALIKE,
    captured_model,
    free_draw,
    plan_that_fits,
)

from meshfold.api import plan_captured
from meshfold.codegen.emit.pass_pipeline import emit
from meshfold.codegen.emit.pipeline import emit_plan
from meshfold.codegen.program.emitted import EmittedProgram
from meshfold.ir.options import CompileOptions
from meshfold.plan_file.io import plan_to_json

NUM_DRAWS = 100
TOLERANCE = 1e-12
ERRORS = "support.search.free_draws:errors_of_steps"


def failures(seed: int, pools: Pools) -> list[str]:
    """What is wrong with a draw; nothing where nothing fits."""
    draw = free_draw(seed)
    plan = plan_that_fits(draw)
    if plan is None:
        return []
    captured = captured_model(draw.family, draw.layers)
    found = pools.run(plan.world_size, ERRORS, seed, captured, plan_to_json(plan))
    return [
        f"{draw.text}, {plan.strategy.label}: {name} differs by {error:.1e} on rank {rank}"
        for rank, errors in enumerate(found)
        for name, error in errors.items()
        if not error <= TOLERANCE
    ]


@pytest.mark.multiprocess
@pytest.mark.slow(20)
@pytest.mark.rotated(4)
@pytest.mark.parametrize("first", range(0, NUM_DRAWS, NUM_ALIKE))
def test_what_the_search_picks_is_right(first: int, pools: Pools) -> None:
    seeds = sorted(range(first, first + NUM_ALIKE), key=lambda s: free_draw(s).cluster.num_devices)
    wrong = [text for seed in seeds for text in failures(seed, pools)]
    assert not wrong, "\n".join(wrong)


SLOW_LINKS = 29
"""A draw whose links make a router a product in a ring on tp, of rows that ep shards as well."""


@pytest.mark.slow(6)
def test_experts_whose_rows_are_routed_by_tp_shards() -> None:
    draw = free_draw(SLOW_LINKS)
    captured = captured_model(draw.family, draw.layers)
    pins = {"ep": 2, "tp": 2, "sp": 1, "zero": 0, "microbatches": 1}
    plan = plan_captured(
        captured, draw.family, draw.cluster, CompileOptions(pins=pins, mode="eager")
    )
    model, batch = tiny_model(draw.family, layers=draw.layers)
    found = errors_of_a_step(model, batch, captured, emit(captured.graph, plan))
    assert max(error for errors in found for error in errors.values()) <= TOLERANCE


UNEVEN_HEADS = 45
"""A draw whose pending sum is read in padded shards, made of the form that leaves it."""


@pytest.mark.slow(6)
def test_a_pending_sum_that_is_read_in_padded_shards() -> None:
    draw = free_draw(UNEVEN_HEADS)
    plan = plan_that_fits(draw)
    assert plan is not None and plan.strategy.tp == 3
    captured = captured_model(draw.family, draw.layers)
    program = emit_plan(captured.graph, plan)
    assert isinstance(program, EmittedProgram)
    model, batch = tiny_model(draw.family, layers=draw.layers)
    found = errors_of_a_step(model, batch, captured, program)
    assert max(error for errors in found for error in errors.values()) <= TOLERANCE
