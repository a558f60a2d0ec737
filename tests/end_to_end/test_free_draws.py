"""What the search picks by itself, on random machines and budgets, is right."""

import pytest
from support.processes.pool import Pools
from support.search.free_draws import (
    NUM_ALIKE,
    captured_model,
    free_draw,
    plan_that_fits,
)

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
@pytest.mark.parametrize("first", range(0, NUM_DRAWS, NUM_ALIKE))
def test_what_the_search_picks_is_right(first: int, pools: Pools) -> None:
    seeds = sorted(range(first, first + NUM_ALIKE), key=lambda s: free_draw(s).cluster.num_devices)
    wrong = [text for seed in seeds for text in failures(seed, pools)]
    assert not wrong, "\n".join(wrong)
